"""The only code that owns device memory or waits for the device."""
