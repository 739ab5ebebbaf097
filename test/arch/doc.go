// Package arch tests the structure of the source tree: which package may import which, which package
// may use which library, how long a file may be, and that each rule of the design has one home and a
// test.
//
// The rules are data (layers_test.go, libraries_test.go), each line with its reason. To change a rule,
// change its line and give the reason in the commit. The checks parse each Go file of the module with
// any build tags, and build nothing. They therefore also cover files that this machine does not
// compile, and take well under a second.
package arch
