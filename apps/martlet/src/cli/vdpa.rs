//! `--vdpa`: which network cards a guest gets.

use std::str::FromStr;

/// Which vDPA network cards a guest gets: `model=mlx5,devices=4,queues=32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VdpaArg {
    /// Cards, 1 to [`VDPA_DEVICES_MAX`].
    pub(crate) devices: u16,
    /// Data queues of each card, an even number from 2 to [`VDPA_QUEUES_MAX`].
    pub(crate) queues: u16,
}

/// Most cards of a guest.
pub(crate) const VDPA_DEVICES_MAX: u16 = 8;
/// Most data queues of a card.
const VDPA_QUEUES_MAX: u16 = 64;

impl FromStr for VdpaArg {
    type Err = String;

    fn from_str(text: &str) -> Result<VdpaArg, String> {
        let mut arg = VdpaArg { devices: 1, queues: 2 };
        let mut seen = Vec::new();
        for item in text.split(',') {
            let (key, value) = item.split_once('=').unwrap_or((item, ""));
            if seen.contains(&key) {
                return Err(format!("`{key}` is given twice"));
            }
            match (key, value) {
                ("model", "mlx5") => {}
                ("model", other) => {
                    return Err(format!("there is no model `{other}`; there is mlx5"));
                }
                ("devices", count) => arg.devices = vdpa_count(key, count, VDPA_DEVICES_MAX)?,
                ("queues", count) => arg.queues = vdpa_queues(count)?,
                _ => return Err(format!("`{item}` is none of model=mlx5, devices=N, queues=N")),
            }
            seen.push(key);
        }
        if !seen.contains(&"model") {
            return Err("say who plays the hardware: model=mlx5".to_owned());
        }
        Ok(arg)
    }
}

impl std::fmt::Display for VdpaArg {
    /// As it is read.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let VdpaArg { devices, queues } = self;
        write!(f, "model=mlx5,devices={devices},queues={queues}")
    }
}

/// Data queues of a card.
pub(super) fn vdpa_queues(text: &str) -> Result<u16, String> {
    let queues = vdpa_count("queues", text, VDPA_QUEUES_MAX)?;
    if queues.is_multiple_of(2) {
        Ok(queues)
    } else {
        Err(format!("{queues} queues: a card has them in pairs"))
    }
}

fn vdpa_count(key: &str, text: &str, max: u16) -> Result<u16, String> {
    match text.parse() {
        Ok(count) if (1..=max).contains(&count) => Ok(count),
        Ok(_) | Err(_) => Err(format!("{key}: `{text}` is not a number from 1 to {max}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_are_read_as_they_are_written() {
        let text = "model=mlx5,devices=4,queues=32";
        let arg: VdpaArg = text.parse().unwrap();
        assert_eq!((arg.devices, arg.queues), (4, 32));
        assert_eq!(arg.to_string().parse(), Ok(arg));
        for (bad, part) in [
            ("", "none of"),
            ("devices=4", "model=mlx5"),
            ("model=e1000", "no model `e1000`"),
            ("model=mlx5,queues=3", "in pairs"),
            ("model=mlx5,queues=66", "1 to 64"),
            ("model=mlx5,devices=0", "1 to 8"),
            ("model=mlx5,devices=1,devices=2", "twice"),
            ("model=mlx5,latency=low", "none of"),
        ] {
            let error = bad.parse::<VdpaArg>().unwrap_err();
            assert!(error.contains(part), "{bad}: {error}");
        }
    }
}
