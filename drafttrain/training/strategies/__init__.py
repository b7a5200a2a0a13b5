"""Ways of training one draft over ranks: replicated (DDP), ZeRO, FSDP2. The trainer knows the interface alone."""
