// Runs the public HTTP cache tests against one cache and writes what came of each, as JSON, to the standard output.
//
//   node run.mjs FOLDER URL      FOLDER holds `package` (the tests) and `node_modules` (node-fetch)

import { createRequire } from 'node:module'
import { pathToFileURL } from 'node:url'
import path from 'node:path'
import process from 'node:process'

const [folder, url] = process.argv.slice(2)
const load = file => import(pathToFileURL(path.join(folder, 'package', file)))
const fetch = createRequire(path.join(path.resolve(folder), 'x'))('node-fetch')

// What the harness reports besides belongs beside the results, not among them.
const log = console.log
console.log = console.error

const { runTests, getResults } = await load('client/runner.mjs')
const suites = [...(await load('tests/index.mjs')).default, (await load('tests/surrogate-control.mjs')).default]
await runTests(suites, fetch, false, url)

const results = getResults()
const tests = suites.flatMap(suite => suite.tests.map(test => ({ suite, test })))
const byId = new Map(tests.map(({ test }) => [test.id, test]))

// A test that rests on another says nothing if that one did not succeed.
function verdict (test) {
  if ((test.depends_on ?? []).some(id => verdict(byId.get(id)) !== 'pass')) return 'untested'
  const result = results[test.id]
  if (result === true) return 'pass'
  return result?.[0] === 'Setup' ? 'untested' : 'fail'
}

function message (test) {
  const failed = (test.depends_on ?? []).filter(id => verdict(byId.get(id)) !== 'pass')
  if (failed.length > 0) return `rests on ${failed.join(', ')}`
  return results[test.id] === true ? '' : String(results[test.id]?.[1] ?? '')
}

log(JSON.stringify(tests.filter(({ test }) => test.id in results).map(({ suite, test }) => ({
  suite: suite.name,
  id: test.id,
  kind: test.kind ?? 'required',
  verdict: verdict(test),
  message: message(test)
})), null, 1))
// Connections that are kept alive would keep this alive too.
process.exit(0)
