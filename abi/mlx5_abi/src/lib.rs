//! mlx5: the layouts of the firmware command interface.
