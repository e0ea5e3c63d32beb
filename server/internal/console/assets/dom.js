// dom makes elements and sortable tables. Text is always set as text, never as markup.

/** Returns the element with an id of index.html. */
export const byId = (id) => document.getElementById(id);

/** Makes an element: properties, then children (nodes or text). */
export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** Sets the text of an element if it differs, so that selections and screen readers are not disturbed. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Sets a name, such as deployments.apps, which is broken at its dots if it needs more than one line. */
function setName(node, text) {
  if (node.textContent !== text) node.replaceChildren(...text.split(/(?<=\.)/).flatMap((label) => [make('wbr'), label]));
}

const svg = 'http://www.w3.org/2000/svg';

/** Draws a line of values, the newest at the right, into an element that has nothing else. most is the number of values that fit. */
export function sparkline(parent, values, most, label) {
  const height = 16;
  let path = parent.querySelector('path');
  if (!path) {
    const image = document.createElementNS(svg, 'svg');
    image.setAttribute('viewBox', `0 -1 ${most} ${height + 2}`);
    image.setAttribute('preserveAspectRatio', 'none');
    image.setAttribute('role', 'img');
    image.classList.add('spark');
    path = image.appendChild(document.createElementNS(svg, 'path'));
    parent.replaceChildren(image);
  }
  const top = Math.max(1, ...values);
  const points = values.map((value, i) => `${most - values.length + i} ${(height * (1 - value / top)).toFixed(1)}`);
  path.setAttribute('d', points.length > 0 ? `M${points.join('L')}` : '');
  path.parentNode.setAttribute('aria-label', label);
}

/**
 * A table whose rows are updated in place: a focused control keeps its focus.
 *
 * A column has title, text(row), and optionally value(row) to sort by, number (right-aligned), wide (hidden on narrow screens),
 * tone(row) (a class), action(row), which makes the text a button, and draw(cell, row), which fills the cell in place of the text.
 */
export class Table {
  constructor(parent, { columns, key, caption, empty, sort, descending = false }) {
    Object.assign(this, { columns, key, empty, sort, descending, rows: new Map(), data: [] });
    this.body = make('tbody');
    this.heads = columns.map((column) => this.head(column));
    this.caption = make('caption', {}, caption);
    parent.replaceChildren(make('div', { className: 'scroll' },
      make('table', {}, this.caption, make('thead', {}, make('tr', {}, ...this.heads)), this.body)));
    this.mark();
  }

  head(column) {
    const th = make('th', { scope: 'col', className: classes(column) });
    if (!column.value) {
      th.textContent = column.title;
      return th;
    }
    th.append(make('button', {
      type: 'button', textContent: column.title, onclick: () => {
        this.descending = this.sort === column ? !this.descending : Boolean(column.number);
        this.sort = column;
        this.mark();
        this.update(this.data);
      },
    }));
    return th;
  }

  mark() {
    this.columns.forEach((column, i) => {
      if (column.value) this.heads[i].setAttribute('aria-sort', column !== this.sort ? 'none' : this.descending ? 'descending' : 'ascending');
    });
  }

  update(data) {
    this.data = data;
    const sorted = [...data];
    if (this.sort) {
      const { value } = this.sort;
      const sign = this.descending ? -1 : 1;
      sorted.sort((a, b) => sign * compare(value(a), value(b)) || compare(this.key(a), this.key(b)));
    }
    const rows = new Map();
    for (const row of sorted) {
      const key = this.key(row);
      const tr = this.rows.get(key) ?? this.row();
      tr.data = row;
      this.columns.forEach((column, i) => {
        const cell = tr.cells[i];
        if (column.draw) column.draw(cell, row);
        else if (column.action) setName(cell.firstChild, column.text(row));
        else setText(cell, column.text(row));
        cell.className = `${classes(column)} ${column.tone?.(row) ?? ''}`;
      });
      rows.set(key, tr);
    }
    this.rows = rows;
    const nodes = [...rows.values()];
    if (nodes.length === 0) nodes.push(make('tr', {}, make('td', { colSpan: this.columns.length, className: 'muted', textContent: this.empty })));
    if (nodes.length !== this.body.children.length || nodes.some((node, i) => node !== this.body.children[i])) {
      const focused = document.activeElement; // a row that is moved loses the focus
      this.body.replaceChildren(...nodes);
      if (focused !== document.activeElement && this.body.contains(focused)) focused.focus({ preventScroll: true });
    }
  }

  row() {
    const tr = make('tr');
    for (const column of this.columns) {
      const cell = make('td');
      if (column.action) cell.append(make('button', { type: 'button', className: 'link', onclick: () => column.action(tr.data) }));
      tr.append(cell);
    }
    return tr;
  }
}

const classes = (column) => [column.number && 'number', column.wide && 'wide'].filter(Boolean).join(' ');

const compare = (a, b) => (typeof a === 'string' ? a.localeCompare(b) : a - b);
