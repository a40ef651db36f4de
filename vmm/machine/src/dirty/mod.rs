//! Dirty tracking.
