"""GGUF files, as llama.cpp, Ollama and LM Studio read them."""
