//! What only the soft provider has.
