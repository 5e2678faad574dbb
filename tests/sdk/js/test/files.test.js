import assert from 'node:assert/strict'
import { randomBytes, randomUUID } from 'node:crypto'
import { after, before, beforeEach, test } from 'node:test'

import { NotFoundError, Sandbox } from 'e2b'

import { eventually, get, origin } from './support.js'

let sandbox, folder
before(async () => {
  sandbox = await Sandbox.create({ timeoutMs: 600_000, envs: { GREETING: 'hello world' } })
})
after(() => sandbox.kill())
beforeEach(async () => {
  folder = `/home/user/${randomUUID()}`
  assert.equal(await sandbox.files.makeDir(folder), true)
})

test('text, bytes and several files round trip', async () => {
  await sandbox.files.write(`${folder}/a.txt`, 'grüße 🙂\n')
  assert.equal(await sandbox.files.read(`${folder}/a.txt`), 'grüße 🙂\n')
  const bytes = randomBytes(3 << 20)
  await sandbox.files.write(`${folder}/b`, bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length))
  assert.ok(bytes.equals(await sandbox.files.read(`${folder}/b`, { format: 'bytes' })))
  await sandbox.files.write([1, 2, 3].map((n) => ({ path: `${folder}/many/${n}`, data: `number ${n}` })))
  assert.equal(await sandbox.files.read(`${folder}/many/2`), 'number 2')
})

test('list, exists, info, rename, remove, make directory', async () => {
  await sandbox.files.write(`${folder}/file`, '12345')
  assert.equal(await sandbox.files.makeDir(`${folder}/dir`), true)
  assert.equal(await sandbox.files.makeDir(`${folder}/dir`), false)
  const entries = Object.fromEntries((await sandbox.files.list(folder)).map((each) => [each.name, each]))
  assert.deepEqual([entries.file.type, entries.dir.type, entries.file.size], ['file', 'dir', 5])
  assert.equal((await sandbox.files.getInfo(`${folder}/file`)).owner, 'user')
  await sandbox.files.rename(`${folder}/file`, `${folder}/moved`)
  assert.equal(await sandbox.files.exists(`${folder}/file`), false)
  assert.equal(await sandbox.files.exists(`${folder}/moved`), true)
  await sandbox.files.remove(`${folder}/moved`)
  assert.equal(await sandbox.files.exists(`${folder}/moved`), false)
  await assert.rejects(sandbox.files.read(`${folder}/none`), NotFoundError)
})

test('odd names work', async () => {
  const names = ['with space', 'new\nline', '-dash', '🙂', 'a%2Fb', '$HOME']
  for (const name of names) await sandbox.files.write(`${folder}/${name}`, name)
  const found = (await sandbox.files.list(folder)).map((each) => each.name)
  assert.deepEqual(found.sort(), [...names].sort())
  for (const name of names) assert.equal(await sandbox.files.read(`${folder}/${name}`), name)
})

test('watch streams changes', async () => {
  const seen = []
  const watch = await sandbox.files.watchDir(folder, (event) => void seen.push(`${event.type} ${event.name}`), {
    recursive: true,
  })
  await sandbox.files.write(`${folder}/new.txt`, 'x')
  await sandbox.files.remove(`${folder}/new.txt`)
  await eventually(() => seen.includes('create new.txt') && seen.includes('remove new.txt'), 'both events')
  await watch.stop()
})

test('signed URLs', async () => {
  await sandbox.files.write(`${folder}/signed`, 'secret')
  const url = new URL(await sandbox.downloadUrl(`${folder}/signed`, { useSignatureExpiration: 60 }))
  const headers = { 'E2b-Sandbox-Id': sandbox.sandboxId, 'E2b-Sandbox-Port': '49983' }
  assert.deepEqual(await get(url.pathname + url.search, headers), { status: 200, text: 'secret' })
  assert.equal((await get(url.pathname + url.search.replace('signed', 'other'), headers)).status, 401)
})

test('a server on the guest loopback, by headers and by host name', async () => {
  await sandbox.files.write(`${folder}/index.html`, 'from inside')
  const server = await sandbox.commands.run('exec python3 -m http.server 8124 --bind 127.0.0.1', {
    background: true,
    cwd: folder,
    timeoutMs: 0,
  })
  await sandbox.commands.run('until (exec 3<>/dev/tcp/127.0.0.1/8124) 2>/dev/null; do sleep 0.1; done')
  const headers = { 'E2b-Sandbox-Id': sandbox.sandboxId, 'E2b-Sandbox-Port': '8124' }
  assert.deepEqual(await get('/', headers), { status: 200, text: 'from inside' })
  assert.deepEqual(await get('/index.html', { Host: sandbox.getHost(8124) }), { status: 200, text: 'from inside' })
  await server.kill()
  const closed = await get('/', { ...headers, 'E2b-Sandbox-Port': '8999' })
  assert.equal(closed.status, 502)
  assert.match(JSON.parse(closed.text).message, /port is not open/)
  assert.ok(origin.startsWith('http://'))
})
