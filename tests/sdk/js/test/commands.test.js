import assert from 'node:assert/strict'
import { createHash } from 'node:crypto'
import { after, before, test } from 'node:test'

import { CommandExitError, NotFoundError, Sandbox, SandboxError, TimeoutError } from 'e2b'

import { eventually } from './support.js'

let sandbox
before(async () => {
  sandbox = await Sandbox.create({ timeoutMs: 600_000, envs: { GREETING: 'hello world' } })
})
after(() => sandbox.kill())

test('foreground gives output and exit code', async () => {
  const result = await sandbox.commands.run('echo out; echo err >&2')
  assert.deepEqual([result.stdout, result.stderr, result.exitCode], ['out\n', 'err\n', 0])
})

test('a non-zero exit is an error with everything in it', async () => {
  await assert.rejects(sandbox.commands.run('echo partial; echo why >&2; exit 42'), (error) => {
    assert.ok(error instanceof CommandExitError)
    assert.deepEqual([error.exitCode, error.stdout, error.stderr], [42, 'partial\n', 'why\n'])
    return true
  })
})

test('streaming callbacks come while the command runs', async () => {
  const seen = []
  const result = await sandbox.commands.run('for i in 1 2 3; do echo line $i; sleep 0.3; done', {
    onStdout: (text) => void seen.push([Date.now(), text]),
  })
  assert.equal(seen.map(([, text]) => text).join(''), result.stdout)
  assert.ok(seen.at(-1)[0] - seen[0][0] > 400, 'all output came at once')
})

test('background, stdin, close and wait', async () => {
  const handle = await sandbox.commands.run('cat; echo end', { background: true, stdin: true })
  await sandbox.commands.sendStdin(handle.pid, 'first\n')
  await handle.sendStdin('zweite ü\n')
  await handle.closeStdin()
  assert.equal((await handle.wait()).stdout, 'first\nzweite ü\nend\n')
})

test('without stdin the command sees end of file', async () => {
  assert.equal((await sandbox.commands.run('cat; echo done', { timeoutMs: 5000 })).stdout, 'done\n')
})

test('environment, working directory and user', async () => {
  const odd = 'quotes \'" $HOME `id`\nü 🙂'
  assert.equal((await sandbox.commands.run('printf %s "$ODD"', { envs: { ODD: odd } })).stdout, odd)
  assert.equal((await sandbox.commands.run('echo $GREETING')).stdout, 'hello world\n')
  assert.equal((await sandbox.commands.run('pwd', { cwd: '/usr/lib' })).stdout, '/usr/lib\n')
  assert.equal((await sandbox.commands.run('id -un', { user: 'root' })).stdout, 'root\n')
  assert.equal((await sandbox.commands.run('id -un')).stdout, 'user\n')
  await assert.rejects(sandbox.commands.run('pwd', { cwd: '/no-such-directory' }), SandboxError)
})

test('a timeout kills the command', async () => {
  const started = Date.now()
  await assert.rejects(sandbox.commands.run('sleep 311', { timeoutMs: 1000 }), TimeoutError)
  assert.ok(Date.now() - started < 6000)
  await eventually(
    async () => !(await sandbox.commands.list()).some((each) => each.args.includes('sleep 311')),
    'the death of the command',
  )
})

test('list shows what runs and kill ends it', async () => {
  const handle = await sandbox.commands.run('sleep 312', { background: true })
  const mine = (await sandbox.commands.list()).find((each) => each.pid === handle.pid)
  assert.equal(mine.cmd, '/bin/bash')
  assert.equal(await handle.kill(), true)
  await assert.rejects(handle.wait(), CommandExitError)
  assert.equal(await sandbox.commands.kill(handle.pid), false)
})

test('connect to a running command', async () => {
  const handle = await sandbox.commands.run('read line; echo got $line', { background: true, stdin: true })
  await handle.disconnect()
  const again = await sandbox.commands.connect(handle.pid)
  await sandbox.commands.sendStdin(handle.pid, 'it\n')
  assert.equal((await again.wait()).stdout, 'got it\n')
  await assert.rejects(sandbox.commands.connect(4_000_000), NotFoundError)
})

test('five megabytes of output arrive whole', async () => {
  const program = "import sys\nfor i in range(327680): sys.stdout.write('%015d\\n' % i)"
  const result = await sandbox.commands.run(`python3 -c "${program}"`)
  const expected = Array.from({ length: 327680 }, (_, i) => String(i).padStart(15, '0') + '\n').join('')
  const digest = (text) => createHash('sha256').update(text).digest('hex')
  assert.equal(result.stdout.length, 5 << 20)
  assert.equal(digest(result.stdout), digest(expected))
})

test('a terminal: create, input, resize, kill', async () => {
  let seen = ''
  const decoder = new TextDecoder()
  const terminal = await sandbox.pty.create({
    cols: 80,
    rows: 24,
    timeoutMs: 60_000,
    onData: (data) => void (seen += decoder.decode(data, { stream: true })),
  })
  const type = (text) => sandbox.pty.sendInput(terminal.pid, new TextEncoder().encode(text))
  await type('stty size\n')
  await eventually(() => seen.includes('24 80'), 'the size', 20_000)
  await sandbox.pty.resize(terminal.pid, { cols: 132, rows: 50 })
  await type('stty size\n')
  await eventually(() => seen.includes('50 132'), 'the new size')
  assert.equal(await sandbox.pty.kill(terminal.pid), true)
  await assert.rejects(terminal.wait(), CommandExitError)
})
