//! What is served where: a port per cell, so that trials alternate without a restart, and one beside it for what is not measured.

use serde::{Deserialize, Serialize};

use crate::plan::{Arm, Cell, Plan, condition::Condition};

/// One cell on one port.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Service {
    /// What is measured there.
    pub cell: Cell,
    /// Its condition.
    pub condition: Condition,
    /// Where.
    pub port: u16,
    /// Where tickets are handed out and connections are held: neither stamped nor recorded. `None` if the condition has neither.
    pub side_port: Option<u16>,
}

impl Service {
    /// Its arm.
    #[must_use]
    pub const fn arm(&self) -> Arm {
        self.cell.arm
    }

    /// The services of a plan, from the port `first` on; with `one_port` all on that one. `None` if that is more ports than there are.
    #[must_use]
    pub fn of_plan(plan: &Plan, first: u16, one_port: bool) -> Option<Vec<Self>> {
        let mut next = (u32::from(first)..=u32::from(u16::MAX)).map(|port| port as u16);
        let cells = plan.cells();
        let mut services = Vec::with_capacity(cells.len());
        for cell in cells {
            services.push(Self {
                cell,
                condition: plan.conditions[cell.condition as usize].clone(),
                port: if one_port { first } else { next.next()? },
                side_port: None,
            });
        }
        for service in &mut services {
            let condition = &service.condition;
            if condition.resumed > 0.0 || condition.held_connections > 0 {
                service.side_port = Some(if one_port { first } else { next.next()? });
            }
        }
        Some(services)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::run::tests::options;

    #[test]
    fn every_cell_has_a_port_and_those_beside_come_behind_all_of_them() {
        let mut plan = options().plan;
        plan.arms = vec![Arm::X25519, Arm::Mlkem768];
        plan.conditions.push(Condition {
            resumed: 0.5,
            ..Condition::default()
        });
        let services = Service::of_plan(&plan, 8443, false).unwrap();
        let ports: Vec<_> = services.iter().map(|each| (each.port, each.side_port)).collect();
        assert_eq!(
            ports,
            [(8443, None), (8444, None), (8445, Some(8447)), (8446, Some(8448))]
        );
        assert_eq!(Service::of_plan(&plan, 65_533, false), None);
    }
}
