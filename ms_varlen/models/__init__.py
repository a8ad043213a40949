"""One decoder for the Llama, Mistral and Qwen families."""
