//! A deterministic RDMA NIC under virtual time.
