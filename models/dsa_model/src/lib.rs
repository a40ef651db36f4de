//! A software Intel DSA.
