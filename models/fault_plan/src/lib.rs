//! Faults as data: what goes wrong in a model, and when.
