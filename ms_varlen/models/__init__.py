"""One decoder for the Llama and Qwen families."""
