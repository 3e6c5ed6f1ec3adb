"""The threads that compute on the CPU, and the library that they run."""
