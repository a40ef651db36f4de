//! 24-bit numbers: object numbers that share a word with something else.

use core::fmt;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A big-endian 24-bit number.
#[derive(
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    Hash,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(transparent)]
pub struct U24([u8; 3]);

impl U24 {
    /// The largest.
    pub const MAX: u32 = 0x00ff_ffff;

    /// The low 24 bits of `value`; the rest has no place in the field.
    pub const fn new(value: u32) -> U24 {
        let [_, high, middle, low] = value.to_be_bytes();
        U24([high, middle, low])
    }

    /// Its value.
    pub const fn get(self) -> u32 {
        u32::from_be_bytes([0, self.0[0], self.0[1], self.0[2]])
    }
}

impl fmt::Debug for U24 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "U24({:#x})", self.get())
    }
}

/// Defines an open enumeration: a number of the interface, with names for those that are known.
/// Unknown values pass through.
macro_rules! open_enum {
    ($(#[$meta:meta])* $name:ident($number:ty) { $($(#[$doc:meta])* $known:ident = $value:expr,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $number);

        impl $name {
            $($(#[$doc])* pub const $known: $name = $name($value);)*

            /// All that have a name here.
            pub const KNOWN: &'static [$name] = &[$($name::$known),*];

            /// Its name in the documents; `None` for a value that is not known.
            pub const fn name(self) -> Option<&'static str> {
                match self {
                    $($name::$known => Some(stringify!($known)),)*
                    _ => None,
                }
            }
        }

        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                core::fmt::Display::fmt(self, f)
            }
        }

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match self.name() {
                    Some(name) => f.write_str(name),
                    None => write!(f, "{}({:#x})", stringify!($name), self.0),
                }
            }
        }
    };
}
pub(crate) use open_enum;
