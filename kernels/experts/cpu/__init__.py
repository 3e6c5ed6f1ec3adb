"""The exact integer sums of an expert in C++, one implementation per instruction set."""
