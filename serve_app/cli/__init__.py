"""The `glassblock` command: generate, chat, concepts, bench and check, against a server or in process."""
