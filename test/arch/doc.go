// Package arch holds the rules about the shape of the source tree as tests: which package may import which, who may use
// which library, how long a file may get, and that each rule of the design has one home and a test.
//
// The rules are data (layers_test.go, libraries_test.go), each line with its reason; to change one is to change the line and
// say why in the commit. The checks parse every Go file of the module, whatever its build tags, and build nothing, so they
// also hold for files that this machine never compiles, and cost well under a second.
package arch
