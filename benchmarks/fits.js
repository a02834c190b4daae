"use strict";
// Draws the table of batches that fit: one row for each model, way to train, length and card.
(() => {
  const { element, select, whole } = page;
  const { card, prose } = report;
  const MIB = 1024 * 1024;
  const PARTS = [
    ["weights", "hue-1"],
    ["gradients", "hue-2"],
    ["optimizer states", "hue-3"],
    ["activations", "hue-5"],
    ["temporary", "hue-8"],
    ["other", "hue-9"],
    ["unused by the allocator", "hue-past"],
    ["outside PyTorch", "hue-11"],
  ];
  const ANY = "any";
  const data = page.data();
  const rooms = data.cards;
  const size = (mib) => page.bytes(mib * MIB);
  const traced = (batch, length) => data.traced.some((point) => point[0] === batch && point[1] === length);

  const rows = data.lines.flatMap(([model, way, length, least, cells]) =>
    Object.keys(rooms).map((name) => {
      const cell = cells.find((each) => each[0] === name);
      const row = { model, way, length, least, card: name, batch: 0, needs: least, next: null, parts: [] };
      [row.kind, row.parameters] = data.models[model];
      if (cell) {
        const [, batch, needs, phase, ...rest] = cell;
        const owners = rest.slice(0, -1);
        const allocated = owners.reduce((sum, part) => sum + part, 0);
        Object.assign(row, { batch, needs, phase, next: rest[rest.length - 1] });
        row.parts = [...owners, Math.max(0, needs - data.outside - allocated), data.outside];
      }
      row.text = [model, row.kind, way, length ? `${length} tokens` : "", name].join(" ");
      return row;
    }),
  );

  function madeOf(row) {
    if (!row.batch) {
      const what = row.length ? "one sample needs" : "weights, gradients and states alone need";
      return element("span", { class: "quiet" }, `${what} ${size(row.needs)}`);
    }
    const bar = element("div", { class: "stack", "aria-hidden": "true" });
    const words = [];
    row.parts.forEach((part, index) => {
      if (!part) return;
      const piece = element("span");
      piece.style.width = `${(100 * part) / rooms[row.card]}%`;
      piece.style.background = `var(--${PARTS[index][1]})`;
      bar.append(piece);
      words.push(`${PARTS[index][0]} ${size(part)}`);
    });
    return element("div", { class: "made" }, bar, element("div", { class: "small" }, words.join(" · ")));
  }

  const columns = [
    { label: "model", value: (row) => row.model, cell: (row) => row.model },
    {
      label: "parameters",
      right: true,
      value: (row) => row.parameters,
      cell: (row) => `${(row.parameters / 1e9).toFixed(1)} B`,
    },
    { label: "way to train", value: (row) => row.way, cell: (row) => row.way },
    {
      label: "tokens",
      right: true,
      value: (row) => row.length || 0,
      cell: (row) => (row.length ? whole(row.length) : "any"),
    },
    { label: "card", value: (row) => rooms[row.card], cell: (row) => row.card },
    {
      label: "largest batch",
      right: true,
      value: (row) => row.batch,
      cell: (row) => (row.batch ? element("strong", {}, whole(row.batch)) : "none"),
    },
    {
      label: "needs",
      right: true,
      value: (row) => row.needs,
      cell: (row) => (row.batch ? size(row.needs) : "–"),
    },
    { label: "made of", value: (row) => row.needs, cell: madeOf },
    {
      label: "next batch needs",
      right: true,
      value: (row) => row.next,
      cell: (row) => (row.next === null ? "–" : size(row.next)),
    },
    {
      label: "figures",
      value: (row) => (row.length && traced(row.batch || 1, row.length) ? 0 : 1),
      cell: (row) => (!row.length ? "computed" : traced(row.batch || 1, row.length) ? "traced" : "derived"),
    },
  ];

  const wanted = { card: "24 GB, RTX 3090 or 4090", length: "2048", model: ANY, way: ANY, words: "" };
  const place = element("div");

  function fill() {
    const words = wanted.words.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = rows.filter(
      (row) =>
        (wanted.card === ANY || row.card === wanted.card) &&
        (wanted.length === ANY || row.length === null || String(row.length) === wanted.length) &&
        (wanted.model === ANY || row.model === wanted.model) &&
        (wanted.way === ANY || row.way === wanted.way) &&
        words.every((word) => row.text.toLowerCase().includes(word)),
    );
    place.replaceChildren(table({ caption: "answer", rows: chosen, columns, sort: 5, folds: true, shown: 50 }));
  }

  function filter(name, label, values) {
    const options = [[ANY, `${label}: any`], ...values.map((value) => [String(value), label === "tokens" ? `${whole(value)} tokens` : value])];
    return select(label, options, wanted[name], (value) => {
      wanted[name] = value;
      fill();
    });
  }

  const search = element("input", {
    type: "search",
    placeholder: "search: words, all must occur",
    "aria-label": "search",
    on: {
      input: () => {
        wanted.words = search.value;
        fill();
      },
    },
  });
  const lengths = [...new Set(rows.map((row) => row.length).filter(Boolean))].sort((a, b) => a - b);
  const legend = element(
    "ul",
    { class: "legend" },
    ...PARTS.map(([name, color]) => element("li", { class: "entry small" }, report.swatch({ color }), name)),
  );

  const head = {
    brand: "memtriage",
    title: "Which batch fits",
    facts: `${data.facts.models} models, predicted without a GPU on ${data.facts.date}: ${data.facts.versions}`,
    about: [prose("Made by `python benchmarks/fits.py`.")],
  };
  report.show(head, [
    card(
      "Largest batch",
      "the length of a bar is the share of the memory that may be used",
      element(
        "div",
        { class: "tools filters" },
        search,
        filter("card", "card", Object.keys(rooms)),
        filter("length", "tokens", lengths),
        filter("model", "model", Object.keys(data.models)),
        filter("way", "way to train", data.ways),
      ),
      legend,
      place,
    ),
    report.notes("How far to trust it", [
      "No cell was compared with a GPU. The predictor itself was: `docs/benchmarks.md`.",
      `${data.facts.exact} of ${data.facts.cells} answers come from a trace of this very size; the others are derived from two traces.`,
      data.facts.check,
      `1 % of a card stays free, and ${size(data.outside)} are outside PyTorch (context, kernels, libraries). Memory of a desktop or another process is not counted.`,
      "Method, cards and limits: `docs/fits.md`.",
    ]),
  ]);
  fill();
})();
