// Shared by the test files. The platform under test is named by the environment, as a user of the SDK would:
// E2B_API_URL, E2B_SANDBOX_URL (both the one origin of `space up`) and E2B_API_KEY.

import http from 'node:http'

for (const name of ['E2B_API_URL', 'E2B_SANDBOX_URL', 'E2B_API_KEY']) {
  if (!process.env[name]) throw new Error(`set ${name} to a running platform (\`space up\` prints it)`)
}

export const origin = process.env.E2B_SANDBOX_URL

/** Polls `check` until it gives something truthy, at most `limitMs`. */
export async function eventually(check, what, limitMs = 10_000) {
  const deadline = Date.now() + limitMs
  for (;;) {
    const found = await check()
    if (found) return found
    if (Date.now() > deadline) throw new Error(`${what} did not come true within ${limitMs} ms`)
    await new Promise((done) => setTimeout(done, 50))
  }
}

/** A GET with any headers, `Host` among them, which `fetch` would not let through. */
export function get(path, headers) {
  return new Promise((done, fail) => {
    http
      .get(new URL(path, origin), { headers }, (answer) => {
        const parts = []
        answer.on('data', (part) => parts.push(part))
        answer.on('end', () => done({ status: answer.statusCode, text: Buffer.concat(parts).toString() }))
        answer.on('error', fail)
      })
      .on('error', fail)
  })
}
