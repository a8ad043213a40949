"""Records to samples: tokenizers, chat templates, cleaning and cutting."""
