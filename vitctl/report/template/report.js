"use strict";
// Readings of the charts: by pointer, and by the arrow keys when a chart has the focus. The page is complete without this.
const numbers = (text) => text.split(" ").filter(Boolean).map(Number);
const short = (value, unit) =>
  unit === "percent" ? (100 * value).toFixed(2) + "%" : Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(4)));

function chart(svg) {
  const lines = [...svg.querySelectorAll("g[data-x]")].map((group) => ({
    group,
    name: group.dataset.name,
    x: numbers(group.dataset.x),
    y: numbers(group.dataset.y),
    at: group.dataset.at.split(" ").filter(Boolean).map((pair) => pair.split(",").map(Number)),
  })).filter((line) => line.x.length);
  const stops = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const cursor = svg.querySelector(".cursor");
  const reading = svg.parentNode.querySelector("output");
  let now = -1;

  const nearest = (values, value) => values.reduce((best, one, n) => (Math.abs(one - value) < Math.abs(values[best] - value) ? n : best), 0);
  function mark(line, n) {
    line.mark ??= line.group.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "circle"));
    line.mark.setAttribute("class", "dot at");
    line.mark.setAttribute("r", 4.5);
    line.mark.setAttribute("cx", line.at[n][0]);
    line.mark.setAttribute("cy", line.at[n][1]);
  }
  function show(stop) {
    now = Math.max(0, Math.min(stops.length - 1, stop));
    const value = stops[now];
    const said = lines.map((line) => {
      const n = nearest(line.x, value);
      mark(line, n);
      cursor.setAttribute("x1", line.at[n][0]);
      cursor.setAttribute("x2", line.at[n][0]);
      const off = line.x[n] === value ? "" : ` (at ${short(line.x[n])})`;
      return `${line.name} ${short(line.y[n], svg.dataset.unit)}${off}`;
    });
    cursor.setAttribute("visibility", "visible");
    reading.textContent = `${svg.dataset.x} ${short(value)}: ${said.join(" · ")}`;
  }
  function hide() {
    now = -1;
    cursor.setAttribute("visibility", "hidden");
    reading.textContent = "";
    for (const line of lines) { line.mark?.remove(); line.mark = undefined; }
  }
  svg.addEventListener("pointermove", (event) => {
    const place = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const all = lines.flatMap((line) => line.at.map((at, n) => [Math.abs(at[0] - place.x), line.x[n]]));
    show(stops.indexOf(all.reduce((best, one) => (one[0] < best[0] ? one : best))[1]));
  });
  svg.addEventListener("pointerleave", () => { if (document.activeElement !== svg) hide(); });
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: now + 1, ArrowLeft: now < 0 ? stops.length - 1 : now - 1, Home: 0, End: stops.length - 1 };
    if (event.key in moves) { show(moves[event.key]); event.preventDefault(); }
    if (event.key === "Escape") hide();
  });
}
const charts = document.querySelectorAll("svg.chart");
for (const svg of charts) chart(svg);
document.getElementById("reading").hidden = !charts.length;
// A printed page shows what is folded on the screen.
let folded = [];
addEventListener("beforeprint", () => { folded = [...document.querySelectorAll("details:not([open])")]; for (const one of folded) one.open = true; });
addEventListener("afterprint", () => { for (const one of folded) one.open = false; });
