"use strict";
// The segments of a snapshot: their map, and what strands memory in them.
//   returns: device -> [card, function that draws it once it is in the page]
function snapshotSegments(data, text) {
  const { element, bytes, counted, unpack } = page;
  const STATE = { used: 0, awaiting: 1, stranded: 2, releasable: 3, mixed: 4 };
  const STATES = [
    { name: "in use", color: "hue-1" },
    { name: "awaiting a stream", color: "awaiting" },
    { name: "stranded", hatched: true, quiet: true, color: "stranded" },
    { name: "releasable", color: "releasable", quiet: true },
    { name: "partly in use", color: "hue-other" },
  ];
  const NO_OWNER = 255;
  const SITE_HUES = 10;

  // What a part of a segment can be painted with, and which of it each way of coloring chooses.
  function paints(parts) {
    const holds = new Map();
    parts.site.forEach((site, part) => {
      if (parts.state[part] === STATE.used) holds.set(site, (holds.get(site) || 0) + parts.size[part]);
    });
    const biggest = [...holds].sort((a, b) => b[1] - a[1]).map(([site]) => site);
    const ranks = new Map(biggest.map((site, rank) => [site, rank]));
    const named = biggest
      .slice(0, SITE_HUES)
      .map((site, rank) => ({ name: text(site), color: `hue-${rank + 1}` }));
    const fills = [...data.owners, ...STATES, ...named, { name: "other sites", color: "hue-other" }];
    const state = (part) => data.owners.length + parts.state[part];
    const used = (part) => parts.state[part] === STATE.used;
    const owner = (part) => (used(part) && parts.owner[part] !== NO_OWNER ? parts.owner[part] : state(part));
    const site = (part) =>
      used(part)
        ? fills.length - 1 - named.length + Math.min(ranks.get(parts.site[part]), named.length)
        : state(part);
    return { fills, by: { owner, site, state } };
  }

  function segments(device) {
    const source = device.map;
    const place = report.card("Segments at the snapshot", null);
    if (!source.groups.length) {
      place.append(element("p", { class: "quiet" }, "There are no segments."));
      return [place, () => {}];
    }
    const columns = (group) =>
      Object.fromEntries(Object.entries(group).map(([key, column]) => [key, unpack(column)]));
    const [rows, parts] = [columns(source.segments), columns(source.parts)];
    const { fills, by } = paints(parts);
    const sums = (fillOf) => {
      const found = new Map();
      parts.size.forEach((size, part) => found.set(fillOf(part), (found.get(fillOf(part)) || 0) + size));
      return found;
    };
    const key = element("ul", { class: "legend" });
    const explain = (fillOf) =>
      key.replaceChildren(
        ...[...sums(fillOf)]
          .sort((a, b) => b[1] - a[1])
          .map(([index, sum]) => report.key(fills[index], "area", bytes(sum))),
      );
    const describe = (segment, part) => {
      const state = parts.state[part];
      const many = parts.count[part] > 1 ? `in ${counted(parts.count[part], "block")} ` : "";
      const mostly = parts.count[part] > 1 ? "most of it " : "";
      const owner =
        state === STATE.used && parts.owner[part] !== NO_OWNER
          ? ` · ${mostly}${data.owners[parts.owner[part]].name}`
          : "";
      const rounding =
        state === STATE.used && parts.requested[part] < parts.size[part] && parts.count[part] === 1
          ? `${bytes(parts.requested[part])} asked for`
          : null;
      const alive = state === STATE.mixed ? `${bytes(parts.requested[part])} of it in use` : null;
      const stranded = rows.stranded[segment] > 0 ? `, ${bytes(rows.stranded[segment])} of it stranded` : "";
      return [
        `${bytes(parts.size[part])} ${many}${STATES[state].name}${owner}`,
        text(parts.site[part]),
        rounding,
        alive,
        `in a segment of ${bytes(rows.size[segment])} at ${source.addresses[segment]}${stranded}`,
      ].filter(Boolean);
    };
    const board = element("div");
    const made = segmentMap(
      board,
      { segments: rows, parts, groups: source.groups },
      { fills, fillOf: by.owner, describe, label: `segments of ${device.device}` },
    );
    const pick = page.choice(
      "color blocks by",
      [
        ["owner", "by owner"],
        ["site", "by site"],
        ["state", "by state"],
      ],
      "owner",
      (name) => {
        made.paintBy(by[name]);
        explain(by[name]);
      },
    );
    explain(by.owner);
    place.append(
      element("div", { class: "tools" }, pick, element("span", { class: "quiet small" }, source.note)),
      board,
      key,
    );
    if (source.pinned.length) {
      place.append(
        element("h3", {}, "What strands memory"),
        table({
          caption: "segment",
          rows: source.pinned,
          sort: 1,
          shown: 8,
          folds: true,
          text: (row) => row.pins.map((pin) => text(pin.site)).join(" "),
          columns: [
            { label: "pinned by", value: (row) => row.pins[0].bytes, cell: pins },
            table.figure("stranded", "stranded", bytes),
            table.figure("segment", "size", bytes),
            table.text("stream and pool", "where"),
          ],
        }),
      );
    }
    return [place, made.ready];
  }

  function pins(row) {
    const line = (pin) =>
      element(
        "div",
        {},
        `${bytes(pin.bytes)} ${pin.count > 1 ? `in ${counted(pin.count, "block")} ` : ""}${pin.owner} · `,
        element("span", { class: "site" }, text(pin.site)),
      );
    const more = row.more
      ? element(
          "div",
          { class: "quiet" },
          `and ${counted(row.more.count, "block")} of ${bytes(row.more.bytes)} from other sites`,
        )
      : null;
    return element("div", {}, ...row.pins.map(line), more);
  }

  return segments;
}
