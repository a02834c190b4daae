"use strict";
// One figure of every rank: a dot a rank, a color a group; ranks that stand out are larger and named.
//   data: {ranks, groups, figures: [{key, name, counts, values}], outliers: [{rank, what}], chosen}
//         columns are packed; a group is counted from 1, 0 is none; a value below 0 is unknown
function rankPlot(place, data) {
  const { element, bytes, whole, color, unpack } = page;
  const HEIGHT = 260;
  const EDGE = { left: 84, right: 20, top: 22, bottom: 30 };
  const DOT = { least: 2.2, most: 3.6, ranks: 220 }; // smaller, the more ranks there are
  const LOUD_DOT = 4.5;
  const NEAR = 14; // pixels from a dot at which it is told
  const TICKS = 4;
  const NARROW = 900; // too narrow a page for all buttons in a row
  const LABEL = { height: 15, most: 24 };
  const HUES = ["hue-1", "hue-2", "hue-5", "hue-3", "hue-10", "hue-12", "hue-9", "hue-11"];
  const STEPS = [1, 2, 2.5, 5, 10];
  const ranks = Array.from(unpack(data.ranks));
  const groups = Array.from(unpack(data.groups));
  const told = new Map(data.outliers.map((one) => [one.rank, one.what]));
  const columns = new Map();
  let figure = data.figures.find((one) => one.key === data.chosen) || data.figures[0];
  let dots = [];

  const canvas = element("canvas", { role: "img" });
  const box = element("div", { class: "map" }, canvas);
  const tip = page.tip(box);
  const missing = element("p", { class: "quiet small" });

  function values() {
    if (!columns.has(figure.key))
      columns.set(
        figure.key,
        Array.from(unpack(figure.values), (value) => (value < 0 ? null : value)),
      );
    return columns.get(figure.key);
  }

  const words = (value) => (figure.counts ? whole(value) : bytes(value));

  // Round numbers of the unit in which the highest value is told.
  function ticks(low, high) {
    const unit = figure.counts ? 1 : 2 ** (10 * Math.floor(Math.log2(Math.max(1, high)) / 10));
    const rough = (high - low) / unit / TICKS;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = STEPS.map((factor) => factor * power).find((one) => one >= rough) * unit;
    const made = [];
    for (let value = Math.ceil(low / step) * step; value <= high; value += step) made.push(value);
    return made;
  }

  function range(known) {
    const low = Math.min(...known);
    const high = Math.max(...known);
    const room = (high - low) * 0.06 || high * 0.05 || 1;
    return [Math.max(0, low - room), high + room];
  }

  function draw(width) {
    const column = values();
    const known = column.filter((value) => value !== null);
    const [low, high] = range(known);
    const pen = page.penOf(canvas, width, HEIGHT);
    pen.font = "12px system-ui, sans-serif";
    const right = width - EDGE.right;
    const bottom = HEIGHT - EDGE.bottom;
    const x = (index) => EDGE.left + ((index + 0.5) / ranks.length) * (right - EDGE.left);
    const y = (value) => bottom - ((value - low) / (high - low)) * (bottom - EDGE.top);

    pen.strokeStyle = color("line");
    pen.fillStyle = color("ink-2");
    pen.lineWidth = 1;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    for (const value of ticks(low, high)) {
      const at = Math.round(y(value)) + 0.5;
      pen.beginPath();
      pen.moveTo(EDGE.left, at);
      pen.lineTo(right, at);
      pen.stroke();
      pen.fillText(words(value), EDGE.left - 8, at);
    }
    pen.textBaseline = "top";
    pen.textAlign = "center";
    const every = Math.max(1, 2 ** Math.ceil(Math.log2((ranks.length * 60) / (right - EDGE.left))));
    for (let index = 0; index < ranks.length; index += every)
      pen.fillText(whole(ranks[index]), x(index), bottom + 10);

    dots = ranks
      .map((rank, index) => ({ rank, index, value: column[index], loud: told.has(rank) }))
      .filter((dot) => dot.value !== null)
      .map((dot) => ({ ...dot, x: x(dot.index), y: y(dot.value) }));
    const quiet = Math.min(DOT.most, Math.max(DOT.least, DOT.ranks / ranks.length));
    for (const dot of [...dots.filter((one) => !one.loud), ...dots.filter((one) => one.loud)]) {
      pen.fillStyle = dot.loud ? color("bad") : hueOf(groups[dot.index]);
      pen.beginPath();
      pen.arc(dot.x, dot.y, dot.loud ? LOUD_DOT : quiet, 0, 2 * Math.PI);
      pen.fill();
    }
    label(pen, right);
    canvas.setAttribute("aria-label", `${figure.name} of ${whole(known.length)} ranks`);
    const left = ranks.length - known.length;
    missing.textContent = left
      ? `${page.counted(left, "rank")} not drawn: this figure is unknown there, or the rank did not come so far.`
      : "";
  }

  const hues = new Map();
  function hueOf(group) {
    const name = group > 0 ? HUES[(group - 1) % HUES.length] : "hue-other";
    if (!hues.has(name)) hues.set(name, color(name));
    return hues.get(name);
  }

  // Names of the ranks that stand out, where there is room for them.
  function label(pen, right) {
    const taken = [];
    pen.fillStyle = color("bad");
    pen.strokeStyle = color("surface");
    pen.lineWidth = 3;
    pen.lineJoin = "round";
    pen.textBaseline = "middle";
    pen.font = "600 12px system-ui, sans-serif";
    for (const dot of dots.filter((one) => one.loud).slice(0, LABEL.most)) {
      const text = `rank ${whole(dot.rank)}`;
      const wide = pen.measureText(text).width;
      const leftwards = dot.x + 8 + wide > right;
      const from = leftwards ? dot.x - 8 - wide : dot.x + 8;
      const free = [-LABEL.height, LABEL.height, 0].find((shift) =>
        taken.every(
          (one) =>
            from > one.to || from + wide < one.from || Math.abs(dot.y + shift - one.y) >= LABEL.height,
        ),
      );
      if (free === undefined) continue;
      pen.textAlign = "left";
      pen.strokeText(text, from, dot.y + free);
      pen.fillText(text, from, dot.y + free);
      taken.push({ from, to: from + wide, y: dot.y + free });
    }
  }

  canvas.addEventListener("pointermove", (event) => {
    const far = (dot) => Math.hypot(dot.x - event.offsetX, dot.y - event.offsetY) - (dot.loud ? LOUD_DOT : 0);
    const nearest = dots.reduce((best, dot) => (best && far(best) <= far(dot) ? best : dot), null);
    if (!nearest || far(nearest) > NEAR) return tip.hide();
    const why = nearest.loud ? [told.get(nearest.rank)] : [];
    return tip.show(
      [`rank ${whole(nearest.rank)}: ${words(nearest.value)}`, ...why],
      nearest.x,
      nearest.y + 12,
    );
  });
  canvas.addEventListener("pointerleave", tip.hide);

  const again = page.drawing(box, (width) => {
    hues.clear();
    draw(width);
  });
  const names = data.figures.map((one) => [one.key, one.name]);
  const form = innerWidth < NARROW ? page.select : page.choice;
  const choose = form("figure", names, figure.key, (key) => {
    figure = data.figures.find((one) => one.key === key);
    tip.hide();
    again(true);
  });
  place.append(element("div", { class: "tools" }, choose), box, missing);
  return () => again(true);
}
