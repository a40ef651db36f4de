//! Many migrating VMs that share accelerators, in virtual time.
