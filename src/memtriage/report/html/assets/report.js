"use strict";
// The forms that reports are made of: cards, facts, tiles, and text with code in it.
const report = (() => {
  const { element } = page;

  const code = (value) => element("code", {}, value);
  const card = (title, aside, ...content) =>
    element("section", { class: "card" }, element("header", {}, element("h2", {}, title), aside), ...content);

  function facts(pairs) {
    const list = element("dl", { class: "facts" });
    for (const [name, value] of pairs) {
      if (value !== null && value !== undefined && value !== "")
        list.append(element("dt", {}, name), element("dd", {}, value));
    }
    return list;
  }

  // What stands between backticks is code.
  const prose = (words) =>
    words === null
      ? null
      : element("span", {}, ...words.split("`").map((part, index) => (index % 2 ? code(part) : part)));

  const tiles = (items) =>
    element(
      "div",
      { class: "tiles" },
      ...items.map(({ label, value, detail }) =>
        element(
          "div",
          { class: "tile" },
          element("div", { class: "label" }, label),
          element("div", { class: "value number" }, value),
          detail ? element("div", { class: "detail" }, detail) : null,
        ),
      ),
    );

  // The head of a page: {brand, title, facts}.
  const masthead = (data) =>
    document
      .getElementById("masthead")
      .append(
        element(
          "div",
          {},
          element("p", { class: "brand" }, data.brand),
          element("h1", {}, data.title),
          element("p", { class: "quiet small" }, data.facts),
        ),
        page.themeChoice(),
      );

  // The banner that says it in a line: {level, word, text}.
  const verdict = ({ level, word, text }, ...more) =>
    element(
      "div",
      { class: `verdict level-${level}`, role: "status" },
      element("span", { class: "word" }, word),
      element("span", {}, text),
      ...more,
    );

  // The values of a fact: paths as code, several one below the other.
  const fact = ([label, values, form]) => {
    const drawn = values.map(form === "path" ? code : prose);
    const several = form === "list" || drawn.length > 1;
    const whole = several ? element("ul", {}, ...drawn.map((value) => element("li", {}, value))) : drawn[0];
    return [label, form === "fix" ? element("div", { class: "fix" }, whole) : whole];
  };

  // A finding: {level, words, amount} above, its facts below.
  const finding = (item) =>
    element(
      "article",
      { class: `card finding ${item.level}` },
      element(
        "header",
        {},
        element("h3", {}, item.words),
        element("span", { class: "amount number" }, item.amount),
      ),
      facts(item.facts.map(fact)),
    );

  const notes = (title, lines) =>
    lines.length
      ? card(
          title,
          null,
          element("div", { class: "notes" }, ...lines.map((line) => element("p", {}, prose(line)))),
        )
      : null;

  const swatch = (row) => {
    const made = element("span", { class: `swatch inline${row.hatched ? " hatched" : ""}` });
    if (!row.hatched) made.style.background = `var(--${row.color})`;
    return made;
  };

  return { card, code, facts, finding, masthead, notes, prose, swatch, tiles, verdict };
})();
