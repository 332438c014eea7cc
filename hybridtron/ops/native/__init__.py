"""CPU implementations of ops in C++, and the code that compiles and calls them."""
