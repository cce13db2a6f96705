"""What the load tests that speak HTTP are made of: traffic, clients, loops, the application under test, figures."""
