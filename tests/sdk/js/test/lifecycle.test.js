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
