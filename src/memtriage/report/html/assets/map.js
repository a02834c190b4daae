"use strict";
// Segments as ribbons that wrap, each with its blocks; the pointer or the arrow keys tell what a part is.
//   data: {segments: {group, size, parts}, parts: {size, fill}, groups: [text]}
//         parts lie in the order of segments, those of one segment in the order of addresses
//   options: {fills: [{name, color, hatched, quiet}], describe: (segment, part) -> [text...], label}
//   fillOf: part -> index into fills
function segmentMap(place, data, options) {
  const { element, color, hatch } = page;
  const ROW = 20;
  const GAP = 5;
  const BETWEEN = 3; // pixels between two segments
  const LEAST = 3; // pixels of the smallest segment
  const NEAR = 2; // a used block this many pixels from the pointer wins over the free one below it
  const ROWS = { least: 4, most: 18, segments: 5 };
  const { segments, parts } = data;
  const count = segments.size.length;
  const starts = new Float64Array(count + 1);
  for (let index = 0; index < count; index += 1) starts[index + 1] = starts[index] + segments.parts[index];
  const total = segments.size.reduce((sum, size) => sum + size, 0);
  let fillOf = options.fillOf;
  const spoken = element("div", { class: "spoken", "aria-live": "polite" });
  const boards = data.groups.map((label, group) => board(label, group));
  place.append(...boards.map((one) => one.figure), spoken);

  // Rows of spans: each segment goes to the first row with room for it, and one longer than a row wraps.
  function lay(group, width, scale) {
    const spans = [];
    const ends = []; // where each row is full
    for (let segment = 0; segment < count; segment += 1) {
      if (segments.group[segment] !== group) continue;
      const pixels = Math.max(LEAST, segments.size[segment] * scale);
      let row = ends.findIndex((end) => end + BETWEEN + pixels <= width);
      if (row < 0) row = ends.push(-BETWEEN) - 1;
      for (let from = 0; from < pixels; row += 1) {
        if (row === ends.length) ends.push(-BETWEEN);
        const x = ends[row] + BETWEEN;
        const here = Math.min(pixels - from, width - x);
        spans.push({ segment, row, x, width: here, from, pixels });
        ends[row] = x + here;
        from += here;
      }
    }
    return { spans, rows: ends.length };
  }

  function board(label, group) {
    const canvas = element("canvas", {
      tabindex: "0",
      role: "group",
      "aria-roledescription": "map",
      "aria-label": `${options.label}: ${label}. Left and right arrow go from block to block.`,
    });
    const box = element("div", { class: "map" }, canvas);
    const tip = page.tip(box);
    const figure = element("figure", {}, element("figcaption", { class: "quiet small" }, label), box);
    let spans = [];
    let current = -1;

    function draw(width) {
      const wanted = Math.min(ROWS.most, Math.max(ROWS.least, Math.ceil(count / ROWS.segments)));
      const laid = lay(group, width, (width * wanted) / total);
      spans = laid.spans;
      const height = laid.rows * (ROW + GAP) - GAP + 2;
      const context = page.penOf(canvas, width, height);
      const paints = options.fills.map((fill) =>
        fill.hatched ? hatch(context, color("stranded"), color("stranded-wash")) : color(fill.color),
      );
      for (const span of spans) drawSpan(context, span, paints);
    }

    function drawSpan(context, span, paints) {
      const { segment } = span;
      const perByte = span.pixels / segments.size[segment];
      const top = span.row * (ROW + GAP) + 1;
      const end = span.x + span.width;
      // Free parts first, so that a used block thinner than a pixel still shows on top of them.
      for (const used of [false, true]) {
        let at = span.x - span.from;
        for (let part = starts[segment]; part < starts[segment + 1]; part += 1) {
          const wide = parts.size[part] * perByte;
          const fill = options.fills[fillOf(part)];
          if (!fill.quiet === used) {
            const from = Math.max(at, span.x);
            const to = Math.min(
              end,
              used ? Math.max(at + wide - (wide > 4 ? 0.75 : 0), at + 1.25) : at + wide,
            );
            if (to > from) {
              context.fillStyle = paints[fillOf(part)];
              context.fillRect(from, top, to - from, ROW);
            }
          }
          at += wide;
        }
      }
      context.strokeStyle = color("ink-3");
      context.lineWidth = 1;
      context.strokeRect(span.x + 0.5, top - 0.5, Math.max(1, span.width - 1), ROW + 1);
    }

    function partAt(span, x) {
      const perByte = span.pixels / segments.size[span.segment];
      let at = span.x - span.from;
      let found = starts[span.segment];
      let near = null;
      for (let part = starts[span.segment]; part < starts[span.segment + 1]; part += 1) {
        const wide = parts.size[part] * perByte;
        if (at <= x) found = part;
        if (!options.fills[fillOf(part)].quiet && at - NEAR <= x && x <= at + wide + NEAR)
          near = near ?? part;
        if (at > x + NEAR) break;
        at += wide;
      }
      return options.fills[fillOf(found)].quiet ? (near ?? found) : found;
    }

    function show(segment, part, x, y) {
      tip.show(options.describe(segment, part), x, y + ROW + 8);
      current = part;
    }

    canvas.addEventListener("pointermove", (event) => {
      const row = Math.floor(event.offsetY / (ROW + GAP));
      const span = spans.find(
        (one) => one.row === row && one.x <= event.offsetX && event.offsetX <= one.x + one.width,
      );
      if (span) show(span.segment, partAt(span, event.offsetX), event.offsetX, row * (ROW + GAP));
      else tip.hide();
    });
    canvas.addEventListener("pointerleave", tip.hide);
    canvas.addEventListener("blur", tip.hide);
    canvas.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") tip.hide();
      if (by === undefined) return;
      event.preventDefault();
      const mine = [...new Set(spans.map((span) => span.segment))];
      const all = mine.flatMap((segment) =>
        Array.from({ length: segments.parts[segment] }, (_, at) => [segment, starts[segment] + at]),
      );
      const place = all.findIndex(([, part]) => part === current);
      const [segment, part] = all[(place + by + all.length) % all.length];
      let before = 0;
      for (let one = starts[segment]; one < part; one += 1) before += parts.size[one];
      const offset = before * (spans.find((one) => one.segment === segment).pixels / segments.size[segment]);
      const span = spans.find((one) => one.segment === segment && offset < one.from + one.width) ?? spans[0];
      show(segment, part, span.x + offset - span.from, span.row * (ROW + GAP));
      spoken.textContent = options.describe(segment, part).join(", ");
    });
    const again = page.drawing(box, draw);
    return { figure, again };
  }

  return {
    paintBy(chosen) {
      fillOf = chosen;
      boards.forEach((one) => one.again(true));
    },
    ready: () => boards.forEach((one) => one.again(true)),
  };
}
