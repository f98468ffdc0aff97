"use strict";
// Every text goes into the page as text, never as markup.
(() => {
  const island = document.getElementById("data");
  if (!island) return;
  const { scans, decisions, rows } = JSON.parse(island.textContent);
  const [FIRST, NEXT] = [200, 1000];
  const byId = (id) => document.getElementById(id);
  const make = (tag, className, ...children) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    node.append(...children);
    return node;
  };
  const solved = (policy) => (policy && policy[1] ? policy[0] / policy[1] : null);

  // --- columns: what sorts them, what a cell shows ---
  const order = Object.keys(decisions);
  const columns = [
    { title: "task", key: (row) => row.id, cell: idCell, className: "id" },
    { title: "repository", key: (row) => row.repo, cell: (row) => [row.repo], className: "repo" },
    { title: "what to do", key: (row) => order.indexOf(row.decision), cell: (row) => [pill(row.decision)] },
  ];
  scans.forEach((scan, index) => columns.push(scan.golden
    ? { title: scan.name, key: (row) => row.scans[index] && row.scans[index].class, cell: (row) => goldenCell(row.scans[index]), className: "scan" }
    : { title: scan.name, key: (row) => solved(row.scans[index] && row.scans[index].solved), cell: (row) => policyCell(row.scans[index]), className: "scan" }));
  columns.push(
    { title: "seconds", key: (row) => row.seconds, cell: (row) => [String(row.seconds)], className: "seconds" },
    { title: "ended as", key: (row) => Object.keys(row.statuses)[0], cell: statusCell },
  );

  function idCell(row) {
    const button = make("button", "", row.id);
    button.type = "button";
    button.setAttribute("aria-expanded", "false");
    button.addEventListener("click", () => fold(button, row));
    return [button];
  }
  function pill(key) {
    const node = make("span", "pill", decisions[key]);
    node.style.setProperty("--of", `var(--${key})`);
    return node;
  }
  function goldenCell(scan) {
    if (!scan) return ["–"];
    const without = scan.null ? [make("small", "", ` without ${scan.null}`)] : [];
    return [`${scan.class} `, make("div", "", make("span", "marks", scan.gold || "–"), ...without)];
  }
  function policyCell(scan) {
    if (!scan) return ["–"];
    const [count, verdicts, low, high] = scan.solved;
    if (!verdicts) return [make("span", "muted", "no verdict")];
    const between = make("small", "", `${Math.round(100 * low)} to ${Math.round(100 * high)} %`);
    between.title = "95 % interval of its solve rate";
    return [`${count}/${verdicts} `, between];
  }
  function statusCell(row) {
    const names = Object.entries(row.statuses);
    return [names.map(([name, count]) => (names.length > 1 || count > 1 ? `${name} ${count}` : name)).join(", ")];
  }

  // --- what is shown ---
  const filters = ["text", "decision", "repo", "status"];
  const field = (name) => byId(`filter-${name}`);
  let sorted = { column: columns[2], ascending: true };
  let found = [];
  let drawn = 0;

  rows.forEach((row) => { row.text = textOf(row); });
  function textOf(row) {
    const parts = [row.id, row.repo, row.decision];
    row.scans.forEach((scan) => scan && scan.outcomes.forEach((one) => parts.push(one.status, one.why, ...one.failing, ...one.lines)));
    return parts.join("\n").toLowerCase();
  }
  function compare(a, b) {
    const [x, y] = [sorted.column.key(a), sorted.column.key(b)];
    const missing = (x === null || x === undefined) - (y === null || y === undefined);
    if (missing) return missing;
    const way = sorted.ascending ? 1 : -1;
    if (x !== y && x !== null && x !== undefined) return (x < y ? -1 : 1) * way;
    return a.id < b.id ? -1 : a.id > b.id ? 1 : 0;
  }
  function update() {
    const [text, decision, repo, status] = filters.map((name) => field(name).value);
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    found = rows.filter((row) => (!decision || row.decision === decision) && (!repo || row.repo === repo)
      && (!status || status in row.statuses) && words.every((word) => row.text.includes(word)));
    found.sort(compare);
    body.replaceChildren();
    drawn = 0;
    draw(FIRST);
    byId("shown").textContent = `${found.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} tasks`;
  }
  function draw(count) {
    const part = document.createDocumentFragment();
    found.slice(drawn, drawn + count).forEach((row) => {
      part.append(make("tr", "", ...columns.map((column) => make("td", column.className || "", ...column.cell(row)))));
    });
    body.append(part);
    drawn = Math.min(drawn + count, found.length);
    const left = found.length - drawn;
    more.hidden = !left;
    more.textContent = left > NEXT ? `Show ${NEXT.toLocaleString("en")} of the other ${left.toLocaleString("en")}` : `Show the other ${left.toLocaleString("en")}`;
  }

  // --- one row's episodes ---
  function fold(button, row) {
    const line = button.closest("tr");
    const open = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!open));
    if (open) { line.nextSibling.remove(); return; }
    const cell = make("td", "", ...row.scans.flatMap((scan, index) => (scan ? [make("h4", "", scans[index].name), ...scan.outcomes.map(outcome)] : [])));
    cell.colSpan = columns.length;
    line.after(make("tr", "detail", cell));
  }
  function outcome(one) {
    const which = one.kind === "null" ? "empty patch" : `${one.kind === "gold" ? "gold patch, " : ""}pass ${one.attempts.join(", ")}`;
    const reward = one.reward === null ? "no verdict" : `reward ${one.reward}`;
    const turns = one.turns === null ? "" : `, ${one.turns} turns`;
    const node = make("div", one.ok ? "outcome" : "outcome bad", make("p", "", `${which}: ${reward}, ${one.status}, ${one.seconds} s${turns}`));
    if (one.why) node.append(make("p", "muted", one.why));
    if (one.failing.length) {
      node.append(make("p", "", one.failing.length + one.more === 1 ? "failing test" : `${one.failing.length + one.more} failing tests`));
      const more = one.more ? [make("li", "", `and ${one.more} more`)] : [];
      node.append(make("ul", "", ...one.failing.map((name) => make("li", "", name)), ...more));
    }
    if (one.lines.length) node.append(make("p", "", "last lines of the error"), make("pre", "", one.lines.join("\n")));
    return node;
  }

  // --- wiring ---
  const body = document.querySelector("#table tbody");
  const more = byId("more");
  const head = document.querySelector("#table thead tr");
  columns.forEach((column) => {
    const button = make("button", "", column.title);
    button.type = "button";
    column.head = make("th", column.className === "id" ? "" : column.className || "", button);
    column.head.scope = "col";
    button.addEventListener("click", () => sortBy(column));
    head.append(column.head);
  });
  function sortBy(column) {
    sorted = { column, ascending: sorted.column === column ? !sorted.ascending : true };
    columns.forEach((one) => one.head.removeAttribute("aria-sort"));
    column.head.setAttribute("aria-sort", sorted.ascending ? "ascending" : "descending");
    update();
  }
  more.addEventListener("click", () => draw(NEXT));
  const form = document.querySelector(".filters");
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", update);
  form.addEventListener("reset", () => setTimeout(update));
  document.querySelectorAll("[data-filter]").forEach((button) => button.addEventListener("click", () => {
    filters.forEach((name) => { field(name).value = name === button.dataset.filter ? button.dataset.value : ""; });
    update();
    byId("tasks").scrollIntoView();
  }));

  const idsOf = (key) => rows.filter((row) => row.decision === key).map((row) => `${row.id}\n`).join("");
  document.querySelectorAll("[data-copy]").forEach((button) => button.addEventListener("click", () => copy(button)));
  async function copy(button) {
    const label = button.textContent;
    try {
      await navigator.clipboard.writeText(idsOf(button.dataset.copy));
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed: save instead";
    }
    setTimeout(() => { button.textContent = label; }, 1500);
  }
  document.querySelectorAll("[data-save]").forEach((button) => button.addEventListener("click", () => {
    const link = make("a", "");
    link.href = URL.createObjectURL(new Blob([idsOf(button.dataset.save)], { type: "text/plain" }));
    link.download = `${button.dataset.save}.txt`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href));
  }));

  columns[2].head.setAttribute("aria-sort", "ascending");
  update();
})();
