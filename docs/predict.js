// Ask for the reader's prediction, and show the results after it. Without JavaScript, all is shown.
const WORDS = {
  en: {
    predict: "predict", see: "see", answer: "Your prediction", // sections, and how the answer begins
    legend: "Prediction", field: "Your prediction", button: "Show results",
    predicted: "You predicted: ", results: see => `The results are in <a href="${see}">See</a>. `,
  },
  "zh-CN": {
    predict: "预测", see: "观察", answer: "预测题的答案",
    legend: "你的预测", field: "你的预测", button: "显示结果",
    predicted: "你的预测：", results: see => `结果见<a href="${see}">“观察”</a>一节。`,
  },
};
const words = WORDS[document.documentElement.lang] ?? WORDS.en;
const [question, see] = [words.predict, words.see].map(
  name => document.getElementById(name)?.closest("section")); // MyST has Chinese names in a <span>
const later = selector => [...document.querySelectorAll(`#${question.id} ~ ${selector}`)];
const answer = question && later("section strong").find(
  strong => strong.textContent.startsWith(words.answer));
if (answer) ask();
makeScrollable();
document.querySelectorAll("[role=heading]").forEach(caption => { caption.ariaLevel = 2; });

function ask() {
  const form = makeForm(), results = findResults();
  const show = isShown => {
    results.forEach(element => { element.hidden = !isShown; });
    makeScrollable();
  };
  const commit = prediction => {
    show(true);
    form.replaceWith(sentence(prediction, words.results(`#${see.id}`)));
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
    commit(prediction);
    try { localStorage[location.pathname] = prediction; } catch { /* ask again next time */ }
    question.querySelector(".prediction").focus(); // a screen reader reads it
  });
  show(false);
  addEventListener("hashchange", showTarget);
  showTarget();
  try { // a browser may forbid storage for file://
    if (localStorage[location.pathname]) commit(localStorage[location.pathname]);
  } catch { /* ask again */ }
}

// Return a form with the options of the question, or with a field for text if it has none.
function makeForm() {
  const form = document.createElement("form");
  form.innerHTML =
    `<fieldset><legend>${words.legend}</legend></fieldset><button>${words.button}</button>`;
  const lists = question.querySelectorAll("ul");
  const options = [...lists].find(list => list.textContent.trim().startsWith("(a)"));
  if (!options) form.firstChild.innerHTML +=
    `<textarea name="prediction" rows="3" required aria-label="${words.field}"></textarea>`;
  for (const option of options?.children ?? []) {
    const label = document.createElement("label");
    label.innerHTML = '<input type="radio" name="prediction" required> <span></span>';
    label.firstChild.value = option.textContent.trim();
    label.lastChild.append(...(option.querySelector("p") ?? option).childNodes);
    form.firstChild.append(label);
  }
  options?.remove();
  return form;
}

// Find the section "See", those after it, outputs before it, and entries in the table of contents.
function findResults() {
  const sections = [see, ...document.querySelectorAll(`#${see.id} ~ section`)];
  const outputs = later("* :is(.highlight-text, .table-wrapper)");
  const entries = [...document.querySelectorAll(".toc-tree li")].filter(
    entry => sections.some(section => entry.querySelector("a").hash === `#${section.id}`));
  return [...sections, ...outputs, ...entries];
}

function sentence(prediction, before = "") {
  const paragraph = document.createElement("p");
  const innerHTML = `${before}${words.predicted}<q></q>`;
  Object.assign(paragraph, { className: "prediction", tabIndex: -1, innerHTML });
  paragraph.querySelector("q").textContent = prediction;
  return paragraph;
}

function makeScrollable() { // with the arrow keys
  document.querySelectorAll("pre, .table-wrapper").forEach(
    block => { if (block.scrollWidth > block.clientWidth) block.tabIndex = 0; });
}
