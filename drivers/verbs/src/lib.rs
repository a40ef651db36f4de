//! RDMA verbs: one interface, over libibverbs or in software.
