package main

import (
	"debug/buildinfo"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"
)

// version is set by the linker for releases (-X main.version=1.2.3). It is the only place for it: metrics, nodes, traces, the
// operators' page and the bill of materials take the version from thisBuild. Without it, the version of the module counts.
var version string

// build describes the running program.
type build struct {
	Version  string `json:"version"`
	Commit   string `json:"commit,omitempty"`
	Time     string `json:"time,omitempty"`
	Modified bool   `json:"modified,omitempty"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

// String returns the text of `outrelay version` and `outrelay --version`.
func (b build) String() string {
	text := fmt.Sprintf("outrelay %s (%s, %s)\n", b.Version, b.Go, b.Platform)
	if b.Commit != "" {
		text += fmt.Sprintf("commit %s %s\n", b.Commit, b.Time)
	}
	return text
}

func thisBuild() build {
	build := build{Version: version, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}

	// A build without a version control system has no settings.
	info, ok := debug.ReadBuildInfo()
	if ok {
		for _, s := range info.Settings {
			switch s.Key {
			case "vcs.revision":
				build.Commit = s.Value
			case "vcs.time":
				build.Time = s.Value
			case "vcs.modified":
				build.Modified = s.Value == "true"
			}
		}
		// A module has the version v1.2.3, and a release 1.2.3.
		if build.Version == "" && info.Main.Version != "(devel)" {
			build.Version = strings.TrimPrefix(info.Main.Version, "v")
		}
	}

	if build.Version == "" {
		build.Version = "dev"
	}
	return build
}

func newVersionCommand(program *program) *cobra.Command {
	var asJSON, sbom bool
	var of string
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version, and with --sbom the modules of this program",
		Long: `Print the version of this program. --sbom prints a CycloneDX document with the version and hash of
each module in it. The linker has stored this list in the program, so it describes this binary and
not a source tree. With --of it describes another program of the same version, for example for
another system.`,
		Args: noArgs,
		RunE: func(*cobra.Command, []string) error {
			build := thisBuild()
			if of != "" && !sbom {
				return errors.New("--of needs --sbom")
			}
			if sbom {
				info, err := readModules(of)
				if err != nil {
					return err
				}
				return printJSON(program.out, newBill(build, info))
			}
			if asJSON {
				return printJSON(program.out, build)
			}

			_, err := fmt.Fprint(program.out, build)
			return err
		},
	}

	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	cmd.Flags().BoolVar(&sbom, "sbom", false, "print the modules of this program as CycloneDX JSON")
	cmd.Flags().StringVar(&of, "of", "", "with --sbom, print the modules of the program in this `file`")
	return cmd
}

// readModules returns the modules of the program in file, or of this program without a file.
func readModules(file string) (*debug.BuildInfo, error) {
	if file != "" {
		info, err := buildinfo.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("--of: %w", err)
		}
		return info, nil
	}

	info, ok := debug.ReadBuildInfo()
	if !ok {
		return nil, errors.New("version: this program was built without module information, so its modules are unknown")
	}
	return info, nil
}
