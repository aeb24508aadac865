"""Who may connect: tokens, certificates and access lists."""
