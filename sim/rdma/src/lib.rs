//! RDMA migration in virtual time: the sender and the receiver on a modelled NIC, with a checker.
