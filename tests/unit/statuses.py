"""A cluster's status in which every field is told."""

from chaosnet.protocols import status as s

STATUS = s.Status(
    node="a",
    phase="member",
    cluster="0badcafe",
    scheduler="a",
    term=3,
    view=(3, 7),
    step=1042,
    samples_per_s=812.5,
    metrics={"loss": 0.25, "norm": None},
    samples_dropped=4,
    samples_set_aside=1,
    parked=None,
    waiting=s.WaitRow(whom=("b",), seconds=25.0, why="its script has not called update()"),
    handling_ms={"ConnectLinkRequest": (0.125, 0.25)},
    members=(
        s.MemberRow(
            node="a",
            id="a",
            state="active",
            addresses=("10.0.0.1:5555",),
            joined_step=0,
            neighbors=("b",),
            report_age_s=0.5,
            step=1042,
            samples_per_s=812.5,
            sync_delay_s=0.03,
            state_bytes=20_000_000,
            layer_bytes=(4, 8_000_000),
            cpu_pct=97.0,
            memory_bytes=300_000_000,
            battery_pct=80.0,
            nic_sent_bytes=5_000_000,
            nic_received_bytes=6_000_000,
            counters={"dropped": 1},
            waits_s=25.0,
        ),
        s.MemberRow(node="b", id="b", state="active", addresses=(), joined_step=12, neighbors=("a",)),
        s.MemberRow(node="c", id="c", state="failed", addresses=(), joined_step=0, neighbors=()),
    ),
    links=(
        s.LinkRow(
            a="a",
            b="b",
            rate_mbit=100.0,
            rate_age_s=7.0,
            rate_source="probe",
            rate_back_mbit=20.0,
            rate_back_age_s=5.0,
            rate_back_source="traffic",
            rtt_min_ms=4.0,
            rtt_median_ms=4.5,
        ),
    ),
    events=(
        s.EventRow(kind="joined", node="b", detail="in 0.5 s", step=12, time_s=1.75e9, handling_ms=0.125),
        s.EventRow(kind="node-failure", node="c", detail="", step=40, time_s=1.75e9 + 20, handling_ms=0.25),
    ),
    steps=(
        s.StepRow(step=1040, time_s=1.75e9, seconds=None, samples=0.0, metrics={}),
        s.StepRow(
            step=1041, time_s=1.75e9 + 1, seconds=0.5, samples=64.0, metrics={"loss": 0.25, "norm": None}
        ),
    ),
    strangers_refused={"too often": 705, "unknown key": 2},
    cut=1500,
)
