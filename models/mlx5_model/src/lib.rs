//! A software mlx5: its firmware and its network queues.
