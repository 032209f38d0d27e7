"""PEFT's LoRA adapters: their configuration, their export, and their merge into the base model."""
