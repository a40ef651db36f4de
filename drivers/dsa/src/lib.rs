//! The Intel DSA driver: discovery, submission, batches, the CPU as the answer to every failure.
