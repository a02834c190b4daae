"use strict";
// A table that sorts by any column, filters by text and shows more rows when asked.
//   columns: {label, value: row -> number|string|null, cell: row -> node|string, right, hint}
//   options: {caption, rows, columns, text: row -> string, sort, shown, filter, folds, narrow}
function table(options) {
  const { element, counted } = page;
  const STEP = options.shown || 25;
  let shown = STEP;
  let wanted = "";
  let sorted = options.sort || 0;
  let falling = true;

  const numeric = (column) => column.right === true;
  const order = (left, right) => {
    const [a, b] = [options.columns[sorted].value(left), options.columns[sorted].value(right)];
    if (a === b) return 0;
    if (a === null) return 1; // what is unknown comes last, whichever way the column is sorted
    if (b === null) return -1;
    const less = a < b ? -1 : 1;
    return falling ? -less : less;
  };

  const heads = options.columns.map((column, index) =>
    element(
      "th",
      { scope: "col", class: column.right ? "right" : null, title: column.hint || null },
      element("button", { type: "button", on: { click: () => sortBy(index) } }, column.label),
    ),
  );
  const body = element("tbody");
  const caption = element("caption", { "aria-live": "polite" });
  const made = element(
    "table",
    { class: `rows${options.folds ? " folds" : ""}${options.narrow ? " narrow" : ""}` },
    caption,
    element("thead", {}, element("tr", {}, ...heads)),
    body,
  );
  const more = element(
    "button",
    {
      type: "button",
      on: {
        click: () => {
          shown += 4 * STEP;
          fill();
        },
      },
    },
    "show more",
  );
  const filter = element("input", {
    type: "search",
    placeholder: "filter: words, all must occur",
    "aria-label": `filter ${options.caption}`,
    on: {
      input: () => {
        wanted = filter.value;
        shown = STEP;
        fill();
      },
    },
  });

  function sortBy(index) {
    falling = index === sorted ? !falling : numeric(options.columns[index]);
    sorted = index;
    fill();
  }

  function fill() {
    const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = options.rows.filter((row) => {
      const text = words.length ? options.text(row).toLowerCase() : "";
      return words.every((word) => text.includes(word));
    });
    chosen.sort(order);
    body.replaceChildren(
      ...chosen.slice(0, shown).map((row) =>
        element(
          "tr",
          {},
          ...options.columns.map((column) =>
            element(
              "td",
              {
                class: column.right ? "right" : null,
                "data-label": column === options.columns[0] ? null : column.label,
              },
              column.cell(row),
            ),
          ),
        ),
      ),
    );
    heads.forEach((head, index) => {
      if (index === sorted) head.setAttribute("aria-sort", falling ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    const seen = Math.min(shown, chosen.length);
    const of = seen < chosen.length ? `${page.whole(seen)} of ` : "";
    const hidden = options.rows.length - chosen.length;
    caption.textContent = `${of}${counted(chosen.length, options.caption)}${hidden ? `, ${page.whole(hidden)} filtered out` : ""}`;
    more.hidden = seen === chosen.length;
  }

  fill();
  return element(
    "div",
    {},
    options.filter ? element("div", { class: "tools" }, filter) : null,
    element("div", { class: "scroll" }, made),
    element("div", { class: "tools" }, more),
  );
}

// A column of figures, and one of texts, that rows have under a key.
table.figure = (label, key, words, hint) => ({
  label,
  right: true,
  hint,
  value: (row) => row[key],
  cell: (row) => words(row[key]),
});
table.text = (label, key) => ({ label, value: (row) => row[key] || "", cell: (row) => row[key] || "" });
