// Ask for the reader's prediction, and show the results after it. Without JavaScript, all is shown.
"use strict";

const question = document.getElementById("predict");
const answer = [...document.querySelectorAll("#see strong")].find(
  strong => strong.textContent.startsWith("Your prediction"));
if (question && answer) ask();
for (const block of document.querySelectorAll("pre, .table-wrapper")) {
  if (block.scrollWidth > block.clientWidth) block.tabIndex = 0; // the arrow keys can scroll it
}

function ask() {
  const form = makeForm(), results = resultsOfThePage();
  const show = isShown => results.forEach(element => { element.hidden = !isShown; });
  const commit = prediction => {
    show(true);
    form.replaceWith(sentence(prediction, ' The results are in the section <a href="#see">See</a>.'));
    answer.closest("p").before(sentence(prediction));
  };
  const showTarget = () => { // of a link, from this page or from a different one
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!results.some(element => element.contains(target))) return;
    show(true);
    target.scrollIntoView();
  };

  question.append(form);
  form.addEventListener("submit", event => {
    event.preventDefault();
    const prediction = new FormData(form).get("prediction");
    store(prediction);
    commit(prediction);
    question.querySelector(".prediction").focus(); // a screen reader reads it
  });
  show(false);
  addEventListener("hashchange", showTarget);
  if (stored()) commit(stored());
  else showTarget();
}

// Return the section "See", all sections after it, their entries in the table of contents, and the
// recorded outputs between "Predict" and "See".
function resultsOfThePage() {
  const after = [...document.querySelectorAll("#predict ~ section")];
  const see = after.findIndex(section => section.id === "see"), sections = after.slice(see);
  const entries = [...document.querySelectorAll(".toc-tree li")].filter(
    entry => sections.some(section => entry.querySelector("a").hash === `#${section.id}`));
  const outputs = after.slice(0, see).map(
    section => [...section.querySelectorAll(".highlight-text, .table-wrapper")]);
  return [...sections, ...entries, ...outputs.flat()];
}

// Return a form with the options of the question, or with a field for text if it has none.
function makeForm() {
  const form = document.createElement("form");
  form.innerHTML = '<fieldset><legend>Your prediction</legend></fieldset><button>Show the results</button>';
  const options = [...question.querySelectorAll("ul")].find(list => /^\s*\(a\)/.test(list.textContent));
  for (const option of options ? options.children : []) {
    const label = document.createElement("label");
    label.innerHTML = '<input type="radio" name="prediction" required> <span></span>';
    label.firstChild.value = option.textContent.trim();
    label.lastChild.append(...(option.querySelector("p") ?? option).childNodes);
    form.firstChild.append(label);
  }
  if (options) options.remove();
  else form.firstChild.innerHTML += '<textarea name="prediction" rows="3" required aria-label="Your prediction"></textarea>';
  return form;
}

function sentence(prediction, rest = "") {
  const paragraph = document.createElement("p");
  paragraph.className = "prediction";
  paragraph.tabIndex = -1;
  paragraph.innerHTML = `You predicted: <q></q>${rest}`;
  paragraph.querySelector("q").textContent = prediction;
  return paragraph;
}

function stored() {
  try { return localStorage.getItem(location.pathname); } catch { return null; }
}

function store(prediction) {
  try { localStorage.setItem(location.pathname, prediction); } catch { /* not allowed here */ }
}
