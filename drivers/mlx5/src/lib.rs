//! The mlx5 vDPA driver: firmware commands in batches.
