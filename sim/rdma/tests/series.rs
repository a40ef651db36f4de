//! The series' table on the modelled NIC, and ours beside it.

use martlet_sim_rdma::series::{Cell, Constants, Table, table};
use martlet_wire::rdma::Pinning;

fn print(table: &Table) {
    for (name, half) in [("pin-all", table.pin_all), ("dynamic", table.dynamic)] {
        for (way, cell) in
            [("before", half.before), ("after", half.after), ("martlet", half.martlet)]
        {
            println!("{name:8} {way:8} {:7.1} ms {:7.0} MiB/s", cell.downtime_ms, cell.mib_s);
        }
    }
}

fn near(cell: Cell, downtime_ms: f64, mib_s: f64) {
    let off = |found: f64, wanted: f64| (found / wanted - 1.0).abs();
    assert!(off(cell.downtime_ms, downtime_ms) <= 0.10, "{cell:?}, reported {downtime_ms} ms");
    assert!(off(cell.mib_s, mib_s) <= 0.10, "{cell:?}, reported {mib_s} MiB/s");
}

#[test]
fn the_table_is_as_the_series_reports_and_ours_is_better() {
    let constants = Constants::SERIES;
    let table = table(&constants);
    print(&table);
    near(table.pin_all.before, 396.7, 9_952.0);
    near(table.pin_all.after, 345.7, 11_639.0);
    near(table.dynamic.before, 248.7, 5_605.0);
    near(table.dynamic.after, 191.1, 9_826.0);
    assert!(table.dynamic.martlet.mib_s >= 0.97 * table.pin_all.martlet.mib_s);
    assert!(table.dynamic.martlet.mib_s >= 0.97 * table.pin_all.after.mib_s);
    for (pinning, cell) in
        [(Pinning::All, table.pin_all.martlet), (Pinning::Dynamic, table.dynamic.martlet)]
    {
        let least = constants.least_downtime_ms(pinning);
        assert!(cell.downtime_ms <= 1.10 * least, "{cell:?}, at least {least:.1} ms");
    }
}
