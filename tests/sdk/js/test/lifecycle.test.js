import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { after, before, test } from 'node:test'

import { AuthenticationError, NotFoundError, Sandbox, SandboxError, SandboxNotFoundError } from 'e2b'

import { eventually } from './support.js'

let sandbox
before(async () => {
  sandbox = await Sandbox.create({ timeoutMs: 600_000, metadata: { suite: 'js' }, envs: { GREETING: 'hello world' } })
})
after(() => sandbox.kill())

async function listed(query) {
  const pages = Sandbox.list(query ? { query } : undefined)
  const found = []
  while (pages.hasNext) found.push(...(await pages.nextItems()))
  return found.map((each) => each.sandboxId)
}

test('create reports a running sandbox', async () => {
  const info = await sandbox.getInfo()
  assert.equal(info.sandboxId, sandbox.sandboxId)
  assert.equal(info.state, 'running')
  assert.equal(info.metadata.suite, 'js')
  assert.ok(info.startedAt < info.endAt)
  assert.equal(await sandbox.isRunning(), true)
})

test('list finds it, filtered and not', async () => {
  assert.ok((await listed()).includes(sandbox.sandboxId))
  assert.ok((await listed({ metadata: { suite: 'js' } })).includes(sandbox.sandboxId))
  assert.deepEqual(await listed({ metadata: { suite: randomUUID() } }), [])
})

test('kill ends it and is idempotent', async () => {
  const made = await Sandbox.create({ timeoutMs: 60_000 })
  assert.equal(await made.kill(), true)
  assert.equal(await made.kill(), false)
  assert.equal(await made.isRunning(), false)
  await assert.rejects(made.commands.run('true'), SandboxNotFoundError)
  await assert.rejects(made.getInfo(), NotFoundError)
})

test('setTimeout moves the end both ways', async () => {
  for (const seconds of [1800, 600]) {
    const asked = Date.now()
    await sandbox.setTimeout(seconds * 1000)
    const left = ((await sandbox.getInfo()).endAt - asked) / 1000
    assert.ok(Math.abs(left - seconds) < 30, `${left} s left instead of ${seconds}`)
  }
})

test('connect gives the same sandbox', async () => {
  const again = await Sandbox.connect(sandbox.sandboxId)
  assert.equal((await again.commands.run('echo $GREETING')).stdout, 'hello world\n')
})

/** A call of our own API, which E2B's SDKs have no method for. */
async function own(path, body = {}) {
  const answer = await fetch(process.env.E2B_API_URL + path, {
    method: 'POST',
    headers: { 'X-API-KEY': process.env.E2B_API_KEY, 'Content-Type': 'application/json' },
    body: JSON.stringify(body),
  })
  assert.ok(answer.ok, `${path}: ${answer.status}`)
  return answer.json()
}

test('connect and calls let a paused one run on', async () => {
  const made = await Sandbox.create({ timeoutMs: 300_000, metadata: { tag: randomUUID() } })
  try {
    const { endAt, metadata } = await made.getInfo()
    assert.equal((await own(`/v1/sandboxes/${made.sandboxId}/pause`)).state, 'paused')
    assert.equal((await made.getInfo()).state, 'paused')
    assert.deepEqual(await listed({ metadata, state: ['paused'] }), [made.sandboxId])
    assert.deepEqual(await listed({ metadata, state: ['running'] }), [])
    assert.equal(await made.isRunning(), false)
    const again = await Sandbox.connect(made.sandboxId, { timeoutMs: 1000 })
    assert.equal((await again.getInfo()).state, 'running')
    assert.ok((await again.getInfo()).endAt >= endAt, 'connect never shortens')
    await own(`/v1/sandboxes/${made.sandboxId}/pause`)
    assert.equal((await made.commands.run('echo awake')).stdout, 'awake\n')
  } finally {
    await made.kill()
  }
})

test('list pages', async () => {
  const tag = randomUUID()
  const made = []
  for (let n = 0; n < 3; n++) made.push(await Sandbox.create({ timeoutMs: 60_000, metadata: { tag } }))
  try {
    const pages = Sandbox.list({ query: { metadata: { tag } }, limit: 2 })
    const first = (await pages.nextItems()).map((each) => each.sandboxId)
    assert.deepEqual(first, [made[2].sandboxId, made[1].sandboxId])
    assert.equal(pages.hasNext, true)
    await made[2].kill()
    assert.deepEqual((await pages.nextItems()).map((each) => each.sandboxId), [made[0].sandboxId])
    assert.equal(pages.hasNext, false)
  } finally {
    for (const each of made) await each.kill()
  }
})

test('a sandbox ends at its timeout', async () => {
  const made = await Sandbox.create({ timeoutMs: 2000 })
  await eventually(async () => !(await made.isRunning()), 'the end by timeout')
})

test('mistakes are typed errors', async () => {
  await assert.rejects(Sandbox.create('no-such-template'), SandboxError)
  await assert.rejects(Sandbox.connect('doesnotexist00000000'), SandboxError)
  await assert.rejects(Sandbox.create({ apiKey: 'e2b_' + '0'.repeat(40) }), AuthenticationError)
})

test('metrics are plausible', async () => {
  const metrics = await eventually(async () => {
    const found = await sandbox.getMetrics()
    return found.length && found
  }, 'a first metric', 15_000)
  const last = metrics.at(-1)
  assert.ok(last.cpuCount >= 1 && last.memUsed > 0 && last.memUsed <= last.memTotal)
})
