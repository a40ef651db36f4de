//! Intel DSA: the layouts of descriptors, completion records and registers.
