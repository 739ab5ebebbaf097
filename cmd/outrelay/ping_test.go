package main

import (
	"strings"
	"testing"
)

// No command prints a part of a password that is not percent-encoded, which looks like the name of a host.
func TestAnUnencodedPasswordIsNotPrinted(t *testing.T) {
	t.Parallel()
	for _, password := range []string{"zq1@zq2", "zq1/zq2", "zq1@zq2/zq3", "zq1:zq2", "zq1%zz"} {
		for _, command := range []string{"ping", "validate", "status"} {
			code, out, errOut := runCommand(t, nil, command, "--set", "mongodb.uri=mongodb://user:"+password+"@127.0.0.1:27017/", "--set", "kafka.brokers=127.0.0.1:1")
			if code == exitOK || strings.Contains(out+errOut, "zq") || !strings.Contains(out+errOut, "percent-encode") {
				t.Errorf("%s with %s: exit code %d, %s%s", command, password, code, out, errOut)
			}
		}
	}
}
