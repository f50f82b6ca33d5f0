// Where nodes are drawn, in a box of width 1 and height 1: few in a circle, many where forces put them.

export const CIRCLE = 12;

export function layout(nodes, links, before, aspect) {
  if (nodes.length === 1) return new Map([[nodes[0], { x: 0.5, y: 0.5 }]]);
  if (nodes.length === 2)
    return new Map([
      [nodes[0], { x: 0.14, y: 0.5 }],
      [nodes[1], { x: 0.86, y: 0.5 }],
    ]);
  return nodes.length <= CIRCLE ? circle(nodes, links, before) : forces(nodes, links, before, aspect);
}

// Neighbours side by side as far as that goes, and those that were there stay in their order.
function circle(nodes, links, before) {
  const angle = (name) => {
    const p = before.get(name);
    return p ? (Math.atan2(p.y - 0.5, p.x - 0.5) + Math.PI / 2 + 6.2831) % 6.2831 : 7;
  };
  const order = [...nodes].sort((a, b) => angle(a) - angle(b));
  const length = () => {
    const place = new Map(order.map((name, i) => [name, i]));
    let sum = 0;
    for (const { a, b } of links)
      if (place.has(a) && place.has(b))
        sum += Math.sin((Math.PI * Math.abs(place.get(a) - place.get(b))) / order.length);
    return sum;
  };
  let best = length();
  for (let better = true; better;) {
    better = false;
    for (let i = 1; i < order.length; i++)
      for (let k = i + 1; k < order.length; k++) {
        [order[i], order[k]] = [order[k], order[i]];
        const now = length();
        if (now < best - 1e-9) {
          best = now;
          better = true;
        } else [order[i], order[k]] = [order[k], order[i]];
      }
  }
  return new Map(
    order.map((name, i) => {
      const turn = (2 * Math.PI * i) / order.length - Math.PI / 2;
      return [name, { x: 0.5 + 0.5 * Math.cos(turn), y: 0.5 + 0.5 * Math.sin(turn) }];
    }),
  );
}

// Fruchterman and Reingold; each round is n^2, and rounds are fewer the more nodes there are.
function forces(nodes, links, before, aspect) {
  const n = nodes.length;
  const at = new Map(nodes.map((name, i) => [name, i]));
  const x = new Float64Array(n);
  const y = new Float64Array(n);
  const dx = new Float64Array(n);
  const dy = new Float64Array(n);
  const edges = links.filter(({ a, b }) => at.has(a) && at.has(b)).map(({ a, b }) => [at.get(a), at.get(b)]);
  let known = 0;
  nodes.forEach((name, i) => {
    const p = before.get(name);
    const turn = i * 2.39996;
    const r = Math.sqrt((i + 0.5) / n) / 2;
    if (p) known++;
    x[i] = p ? p.x * aspect : (0.5 + r * Math.cos(turn)) * aspect;
    y[i] = p ? p.y : 0.5 + r * Math.sin(turn);
  });
  const k = 0.9 * Math.sqrt(aspect / n);
  const anew = known < n / 2;
  const rounds = Math.max(12, Math.min(anew ? 260 : 90, Math.floor(1.6e7 / (n * n))));
  for (let round = 0; round < rounds; round++) {
    const heat = (anew ? 0.12 : 0.03) * (1 - round / rounds) + 0.001;
    dx.fill(0);
    dy.fill(0);
    for (let i = 0; i < n; i++)
      for (let j = i + 1; j < n; j++) {
        let ux = x[i] - x[j],
          uy = y[i] - y[j],
          d2 = ux * ux + uy * uy;
        if (d2 < 1e-8) {
          ux = 1e-4 * (i - j);
          uy = 1e-4;
          d2 = 1e-8;
        }
        const f = (k * k) / d2;
        dx[i] += ux * f;
        dy[i] += uy * f;
        dx[j] -= ux * f;
        dy[j] -= uy * f;
      }
    for (const [i, j] of edges) {
      const ux = x[i] - x[j];
      const uy = y[i] - y[j];
      const f = Math.hypot(ux, uy) / k;
      dx[i] -= ux * f;
      dy[i] -= uy * f;
      dx[j] += ux * f;
      dy[j] += uy * f;
    }
    for (let i = 0; i < n; i++) {
      dx[i] += (aspect / 2 - x[i]) * 0.2;
      dy[i] += (0.5 - y[i]) * 0.5; // So that parts without links stay in sight.
      const d = Math.hypot(dx[i], dy[i]) || 1;
      const go = Math.min(d, heat) / d;
      x[i] += dx[i] * go;
      y[i] += dy[i] * go;
    }
  }
  const [left, right, top, bottom] = [Math.min(...x), Math.max(...x), Math.min(...y), Math.max(...y)];
  return new Map(
    nodes.map((name, i) => [name, { x: (x[i] - left) / (right - left || 1), y: (y[i] - top) / (bottom - top || 1) }]),
  );
}
