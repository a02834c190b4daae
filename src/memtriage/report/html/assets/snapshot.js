"use strict";
// The page of a memory snapshot: one tab a device. Everything shown was computed before; here it is only drawn.
(() => {
  const { element, bytes, signed, whole, seconds, unpack } = page;
  const { card, code, facts, finding, tiles } = report;
  const data = page.data();
  const root = document.documentElement;
  const CROWDED =
    "There are more events than columns: each column shows its instant of most allocated memory, and the line " +
    "the least that was allocated. Zoom in to see all events.";
  const drawn = { charts: 0, maps: 0 };

  const text = (index) => (index < 0 ? null : data.texts[index]);
  const segments = snapshotSegments(data, text);

  function course(device) {
    const place = card("Memory over the recording", "drag to zoom in, double click for the whole");
    const source = device.timeline;
    if (source === null) {
      place.append(
        element(
          "p",
          { class: "quiet" },
          "No events were recorded: this snapshot tells what is there now, not how it came to be.",
        ),
      );
      return [place, () => {}];
    }
    const events = unpack(source.event);
    const times = unpack(source.time_us).map((time) => time / 1e6);
    const layers = source.layers.map((layer) => ({ ...layer, values: unpack(layer.values) }));
    const lines = source.lines.map((line) => ({ ...line, values: unpack(line.values) }));
    const board = element("div");
    place.append(board);
    return [
      place,
      () => {
        const made = timeline(board, {
          label: `Allocated and reserved memory of ${device.device}, stacked by owner. ${device.summary}`,
          axes: [
            {
              key: "event",
              label: "event",
              values: events,
              format: (value) => (Number.isInteger(value) ? whole(value) : ""),
            },
            { key: "time", label: "time", values: times, format: seconds },
          ],
          layers,
          lines,
          marks: source.marks,
          legendRow: source.peak_row,
          crest: lines[0],
          crowded: CROWDED,
        });
        if (source.left_out) board.append(element("p", { class: "quiet small" }, source.left_out));
        drawn.charts += 1;
        root.dataset.points = String(made.rows);
      },
    ];
  }

  function owners(device) {
    const widest = Math.max(1, ...device.owners.flatMap((row) => [row.at_peak, row.at_end]));
    const amount = (row, key) => {
      const bar = element("span", { class: "bar" });
      bar.style.width = `${(110 * row[key]) / widest}px`;
      bar.style.background = `var(--${row.color})`;
      return element("span", {}, bytes(row[key]), " ", bar);
    };
    return card(
      "What was alive",
      null,
      table({
        caption: "owner",
        rows: device.owners,
        sort: 1,
        folds: true,
        text: (row) => row.name,
        columns: [
          {
            label: "owner",
            value: (row) => row.name,
            cell: (row) => element("span", { title: row.meaning }, report.swatch(row), row.name),
          },
          { label: "at the peak", value: (row) => row.at_peak, cell: (row) => amount(row, "at_peak") },
          { label: "at the snapshot", value: (row) => row.at_end, cell: (row) => amount(row, "at_end") },
        ],
      }),
    );
  }

  function sites(device) {
    const rows = device.sites.rows.map(
      ([site, owner, atPeak, atEnd, countAtEnd, allocations, allocated, perStep, frames]) => ({
        site,
        owner: data.owners[owner].name,
        atPeak,
        atEnd,
        countAtEnd,
        allocations,
        allocated,
        perStep,
        frames,
      }),
    );
    const name = (row) =>
      row.frames.length > 1
        ? element(
            "details",
            {},
            element("summary", { class: "site" }, text(row.site)),
            element("ol", { class: "site" }, ...row.frames.map((frame) => element("li", {}, text(frame)))),
          )
        : element("span", { class: "site" }, text(row.site));
    const { figure } = table;
    const growth = device.steps > 0;
    return card(
      "Allocation sites",
      device.sites.note,
      table({
        caption: "site",
        rows,
        sort: 2,
        filter: true,
        folds: true,
        text: (row) => `${text(row.site)} ${row.owner} ${row.frames.map(text).join(" ")}`,
        columns: [
          { label: "site", value: (row) => text(row.site), cell: name },
          table.text("owner", "owner"),
          figure("at the peak", "atPeak", bytes, "bytes alive when most was allocated"),
          figure("at the snapshot", "atEnd", bytes, "bytes alive at the end of the recording"),
          ...(growth ? [figure("growth per step", "perStep", signed, "bytes more from step to step")] : []),
          figure("blocks alive", "countAtEnd", whole, "blocks alive at the end of the recording"),
          figure("allocations", "allocations", whole, "allocations in the recording"),
          figure("allocated in all", "allocated", bytes, "bytes of all those allocations together"),
        ],
      }),
    );
  }

  function failure(oom) {
    const list = element("div");
    if (oom.free.length) {
      list.append(
        table({
          caption: "free block",
          rows: oom.free,
          sort: 0,
          shown: 8,
          narrow: true,
          text: () => "",
          columns: [
            table.figure("size", "size", bytes),
            {
              label: "short of the request by",
              right: true,
              value: (row) => oom.requested - row.size,
              cell: (row) => (row.size >= oom.requested ? "big enough" : bytes(oom.requested - row.size)),
            },
            table.text("stream and pool", "where"),
            table.text("", "remark"),
          ],
        }),
      );
    }
    return card(
      "Out of memory",
      oom.when,
      facts([
        ["asked for", bytes(oom.requested)],
        ["at", code(text(oom.site))],
        ["free on the device", bytes(oom.device_free)],
        ["allocated", bytes(oom.allocated)],
        ["reserved", bytes(oom.reserved)],
        ["free in segments", oom.free_words],
      ]),
      list,
    );
  }

  function build(panel, device) {
    report.put(panel, [
      report.verdict(device.verdict),
      ...device.findings.map(finding),
      tiles(device.tiles),
      course(device),
      ...device.ooms.map(failure),
      owners(device),
      segments(device),
      sites(device),
      report.notes("What this recording does not tell", device.notes),
    ]);
    drawn.maps += 1;
    for (const [name, count] of Object.entries(drawn)) root.dataset[name] = String(count);
  }

  const set = page.tabs(
    "devices",
    data.devices.map((device) => ({
      label: device.device,
      level: device.verdict.level,
      build: (panel) => build(panel, device),
    })),
  );
  const nothing = "There is no device in this file: no segments and no events.";
  const first = data.devices.length
    ? [set.bar, () => set.show(0, false)]
    : element("p", { class: "card" }, nothing);
  report.show(data, [first, ...set.panels]);
})();
