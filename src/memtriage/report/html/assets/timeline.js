"use strict";
// Stacked areas and lines over time or over a count, with zoom (drag, buttons, keys), marks and a legend that reads
// values.
//   options: {label, axes: [{key, label, values, format, read}], layers: [{name, color, hatched, values}],
//             lines: [{name, color, values, fill, width, dash}], marks: [{at: {axis key: value}, label, strong,
//             color}], legendRow, crest: one of the lines, crowded: what to say of that}
//   and where wanted: fit: whether the vertical axis starts above 0 (the reader can choose then), bounds: values in
//             whose sight it ends, [{value, label}], bands: [{high, low: lines, fill}], describe: row -> words
// A layer lies on those before it; its own values are given, not the sums. The first line lies on top. Where several
// instants fall on a column, it shows the one with the highest crest, which needs no line then where there are
// layers, and a line shows the lowest crest. What was not read is null.
function timeline(place, options) {
  const { element, bytes, color, hatch } = page;
  const HEIGHT = 360;
  const NARROW = 560;
  const NARROW_HEIGHT = 260;
  const VERTICAL_AXIS = 70; // about what it takes of the width
  const COLUMN = 2; // pixels of a column where more happens than can be drawn
  const PAN = 0.25;
  const hidden = new Set();
  let axis = options.axes[0];
  let chart = null;
  let span = null; // what is zoomed to, in rows: it stays when the axis changes
  let fitted = options.fit === true;
  let view = null; // what is drawn: {rows, places, lows, crowded}
  const lowest = { name: `lowest ${options.crest.name}`, color: "ink", values: [] };

  const board = element("div", {
    class: "chart",
    role: "group",
    "aria-roledescription": "chart",
    tabindex: "0",
    "aria-label": `${options.label} Keys: + and - zoom, the arrows move, 0 shows the whole.`,
  });
  const drawnLines = [...options.lines].reverse();
  const amounts = new Map();
  const where = element("span", { class: "quiet small number" });
  const legend = element("ul", { class: "legend" });

  function entry(item, kind) {
    const amount = element("span", { class: "amount number" });
    amounts.set(item, amount);
    const button = element(
      "button",
      {
        type: "button",
        "aria-pressed": "true",
        title: "show or hide",
        on: {
          click: () => {
            if (!hidden.delete(item)) hidden.add(item);
            button.setAttribute("aria-pressed", String(!hidden.has(item)));
            again(true);
          },
        },
      },
      report.swatch(item, kind),
      item.name,
      amount,
    );
    return element("li", {}, button);
  }
  const lowestEntry = entry(lowest, "line");
  legend.append(
    ...[...options.layers].reverse().map((layer) => entry(layer, "area")),
    ...options.lines.map((line) => entry(line, "line")),
    lowestEntry,
  );
  const crowdedNote = element("p", { class: "quiet small", hidden: "" }, options.crowded);

  // The values at a row; of a place in the view also its lowest crest.
  function read(row, place) {
    for (const [item, amount] of amounts) amount.textContent = bytes(item.values[row]);
    amounts.get(lowest).textContent = place === undefined ? "" : bytes(view.lows[place]);
    const values = options.axes.map((one) => `${one.label} ${(one.read || one.format)(one.values[row])}`);
    if (options.describe) values.push(options.describe(row));
    where.textContent = `${row === options.legendRow ? "at the peak: " : ""}${values.join(" · ")}`;
  }

  // Chooses the rows to draw on so many columns of pixels.
  function look(columns) {
    const [low, high] = current();
    const [first, last] = [Math.max(0, low - 1), Math.min(axis.values.length - 1, high + 1)];
    if (last - first < COLUMN * columns) {
      const rows = Array.from({ length: last - first + 1 }, (_, index) => first + index);
      return {
        rows,
        places: rows.map((row) => axis.values[row]),
        lows: rows.map(() => null),
        crowded: false,
      };
    }
    const [min, max] = bounds();
    const wide = (max - min) / columns || 1;
    const crest = options.crest.values;
    const [rows, places, lows] = [[], [], []];
    const put = (column, row) => {
      places.push(min + column * wide);
      rows.push(row);
      lows.push(crest[row]);
    };
    let before = -1;
    for (let row = low; row <= high; row += 1) {
      const column = Math.min(columns - 1, Math.floor((axis.values[row] - min) / wide));
      if (column > before) {
        if (column > before + 1 && row > low) put(before + 1, row - 1); // nothing happens until then
        put(column, row);
        before = column;
      } else {
        const at = rows.length - 1;
        if (crest[row] > crest[rows[at]]) rows[at] = row;
        lows[at] = Math.min(lows[at], crest[row]);
      }
    }
    put(columns, high);
    return { rows, places, lows, crowded: true };
  }

  // From the top of the stack down, so that each area is painted over what lies above it.
  function stacked() {
    const columns = [];
    let below = view.rows.map(() => 0);
    for (const layer of options.layers) {
      if (!hidden.has(layer)) below = below.map((value, place) => value + layer.values[view.rows[place]]);
      columns.push(below);
    }
    const lines = drawnLines.map((line) => view.rows.map((row) => line.values[row]));
    return [view.places, ...columns.reverse(), ...lines, view.lows];
  }

  function lookAgain() {
    const width = chart ? chart.over.clientWidth : board.clientWidth - VERTICAL_AXIS;
    view = look(Math.max(1, Math.floor(width / COLUMN)));
    lowestEntry.hidden = crowdedNote.hidden = !view.crowded;
    board.dataset.crowded = String(view.crowded);
  }

  function fill(layer) {
    return (self) =>
      layer.hatched ? hatch(self.ctx, color("stranded"), color("stranded-wash")) : color(layer.color);
  }

  function series() {
    const steps = uPlot.paths.stepped({ align: 1 });
    const plain = { points: { show: false }, paths: steps };
    return [
      {},
      ...[...options.layers].reverse().map((layer) => ({
        ...plain,
        label: layer.name,
        width: 0,
        show: !hidden.has(layer),
        fill: fill(layer),
      })),
      ...[...drawnLines, lowest].map((line) => ({
        ...plain,
        label: line.name,
        width: line.width || 1.5,
        dash: line.dash,
        show: !hidden.has(line),
        stroke: () =>
          view.crowded && line === options.crest && options.layers.length
            ? "transparent"
            : color(line.color),
        fill: line.fill ? () => color(line.fill) : undefined,
      })),
    ];
  }

  function bands() {
    const place = (line) => 1 + options.layers.length + drawnLines.indexOf(line);
    return (options.bands || []).map(({ high, low, fill: shade }) => ({
      series: [place(high), place(low)],
      fill: () => color(shade),
    }));
  }

  // A bound is shown once the course comes near it.
  const NEAR = 0.6;
  function heights(self, low, high) {
    const near = (options.bounds || []).map(({ value }) => value).filter((value) => high >= NEAR * value);
    const top = Math.max(high || 1, ...near);
    const room = (top - low || top) * 0.06;
    return fitted ? [Math.max(0, low - room), top + room] : [0, top * 1.04];
  }

  function drawBounds(self) {
    const { ctx, bbox } = self;
    ctx.save();
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textBaseline = "bottom";
    ctx.textAlign = "left";
    ctx.strokeStyle = ctx.fillStyle = color("bad");
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
    for (const { value, label } of options.bounds || []) {
      const y = Math.round(self.valToPos(value, "y", true));
      if (y < bbox.top || y > bbox.top + bbox.height) continue;
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      ctx.fillText(label, bbox.left + 4 * devicePixelRatio, y - 4 * devicePixelRatio);
    }
    ctx.restore();
  }

  function drawMarks(self) {
    const { ctx, bbox } = self;
    const ratio = devicePixelRatio;
    const taken = [];
    ctx.save();
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    ctx.textBaseline = "bottom";
    ctx.textAlign = "left";
    for (const mark of options.marks) {
      const x = Math.round(self.valToPos(mark.at[axis.key], "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = ctx.fillStyle = color(mark.strong ? mark.color || "ink" : "ink-3");
      ctx.lineWidth = ratio;
      ctx.setLineDash(mark.strong ? [] : [2 * ratio, 3 * ratio]);
      ctx.globalAlpha = mark.strong ? 1 : 0.75;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.globalAlpha = 1;
      const width = ctx.measureText(mark.label).width;
      const wish = mark.strong ? x - width / 2 : x - width; // the others end what they name
      const left = Math.max(bbox.left, Math.min(wish, bbox.left + bbox.width - width));
      const apart = 6 * ratio;
      if (taken.every(([from, to]) => left + width + apart < from || left > to + apart)) {
        ctx.fillText(mark.label, left, bbox.top - 3 * ratio);
        taken.push([left, left + width]);
      }
    }
    ctx.restore();
  }

  const bounds = () =>
    span
      ? [axis.values[span[0]], axis.values[span[1]]]
      : [axis.values[0], axis.values[axis.values.length - 1]];

  function rowAt(value) {
    let [low, high] = [0, axis.values.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (axis.values[middle] <= value) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  function zoom(first, last) {
    const end = axis.values.length - 1;
    const [low, high] = [Math.max(0, Math.round(first)), Math.min(end, Math.round(last))];
    span = high - low < 2 || (low === 0 && high === end) ? null : [low, high];
    const [min, max] = bounds();
    lookAgain();
    chart.batch(() => {
      chart.setData(stacked(), false);
      chart.setScale("x", { min, max });
    });
    buttons.forEach((button) => {
      button.disabled = span === null && button.dataset.always === undefined;
    });
    board.dataset.span = span ? span.join("-") : "";
  }

  const current = () => span || [0, axis.values.length - 1];
  const scaled = (factor) => {
    const [low, high] = current();
    const pointed = view.rows[chart.cursor.idx];
    const middle = pointed > low && pointed < high ? pointed : (low + high) / 2;
    zoom(middle - (middle - low) * factor, middle + (high - middle) * factor);
  };
  const moved = (share) => {
    const [low, high] = current();
    const by = share * (high - low);
    const held = by < 0 ? Math.max(by, -low) : Math.min(by, axis.values.length - 1 - high);
    zoom(low + held, high + held);
  };
  const acts = [
    ["+", "zoom in", () => scaled(0.5), true],
    ["−", "zoom out", () => scaled(2)],
    ["◀", "earlier", () => moved(-PAN)],
    ["▶", "later", () => moved(PAN)],
    ["whole", "show the whole course", () => zoom(0, Infinity)],
  ];
  const buttons = acts.map(([text, label, act, always]) =>
    element(
      "button",
      {
        type: "button",
        "aria-label": label,
        title: label,
        "data-always": always ? "" : null,
        on: { click: act },
      },
      text,
    ),
  );
  const keys = {
    "+": acts[0][2],
    "=": acts[0][2],
    "-": acts[1][2],
    ArrowLeft: acts[2][2],
    ArrowRight: acts[3][2],
    0: acts[4][2],
  };
  board.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });

  function draw(width) {
    if (chart) chart.destroy();
    chart = null;
    lookAgain();
    const narrow = width < NARROW;
    const text = {
      stroke: () => color("ink-2"),
      font: "12px system-ui, sans-serif",
      grid: { stroke: () => color("grid"), width: 1 },
      ticks: { stroke: () => color("line"), width: 1, size: 5 },
    };
    chart = new uPlot(
      {
        width,
        height: narrow ? NARROW_HEIGHT : HEIGHT,
        padding: [18, 18, 0, 0],
        legend: { show: false },
        scales: {
          x: { time: false, range: () => bounds() },
          y: { range: heights },
        },
        axes: [
          {
            ...text,
            label: axis.label,
            labelSize: 20,
            labelFont: "12px system-ui, sans-serif",
            size: 34,
            space: narrow ? 60 : 80,
            values: (self, ticks) => ticks.map((tick) => axis.format(tick)),
          },
          {
            ...text,
            size: narrow ? 62 : 74,
            splits: byteSplits,
            values: (self, ticks) =>
              ticks.map((tick) => (tick === 0 ? "0" : tickBytes(tick, ticks[1] - ticks[0]))),
          },
        ],
        cursor: {
          y: false,
          points: { show: false },
          drag: { x: true, y: false, setScale: false },
          bind: { dblclick: () => () => zoom(0, Infinity) },
        },
        series: series(),
        bands: bands(),
        hooks: {
          draw: [drawBounds, drawMarks],
          setCursor: [
            (self) =>
              self.cursor.idx === null || self.cursor.idx === undefined
                ? read(options.legendRow)
                : read(view.rows[self.cursor.idx], self.cursor.idx),
          ],
          setSelect: [
            (self) => {
              if (self.select.width < 3) return;
              const [from, to] = [self.select.left, self.select.left + self.select.width].map((at) =>
                self.posToVal(at, "x"),
              );
              self.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
              zoom(rowAt(from), rowAt(to) + 1);
            },
          ],
        },
      },
      stacked(),
      board,
    );
    read(options.legendRow);
  }

  const axisChoice = page.choice(
    "horizontal axis",
    options.axes.map((one) => [one.key, one.label]),
    axis.key,
    (key) => {
      axis = options.axes.find((one) => one.key === key);
      again(true);
    },
  );
  const heightChoice =
    options.fit === undefined
      ? null
      : page.choice(
          "vertical axis",
          [
            ["whole", "from 0"],
            ["fitted", "fitted"],
          ],
          fitted ? "fitted" : "whole",
          (key) => {
            fitted = key === "fitted";
            again(true);
          },
        );
  const tools = [...buttons, axisChoice, heightChoice, where].filter(Boolean);
  place.append(element("div", { class: "tools" }, ...tools), board, legend, crowdedNote);
  const again = page.drawing(board, draw);
  again(true);
  buttons.forEach((button) => {
    button.disabled = button.dataset.always === undefined;
  });
  return { rows: axis.values.length };
}

// Ticks at round numbers of binary units: 1, 2, 4 ... 512 of one, or halves of the greatest.
function byteSplits(self, axisIndex, low, high) {
  const MOST = self.height < 300 ? 5 : 7;
  let step = 1;
  while ((high - low) / step > MOST) step *= 2;
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) ticks.push(tick);
  return ticks;
}

// As page.bytes, with the decimals that halves and quarters of a unit need, or that tell ticks apart, and no others.
function tickBytes(value, step) {
  const unit = page.bytes(value).split(" ")[1];
  const power = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"].indexOf(unit);
  const decimals = Math.max(2, Math.ceil(-Math.log10((step || value) / 1024 ** power)));
  return `${Number((value / 1024 ** power).toFixed(Math.min(decimals, 6)))} ${unit}`;
}
