# Sourced after setup.sh: the page's two packages of npm, 14 MB, in the folder $BROWSER_PACKAGES. Their
# bundles need nothing else, so nothing is installed.
ORT_WEB=onnxruntime-web@1.30.0
TOKENIZERS_JS=@huggingface/tokenizers@0.2.0

fetch_bundles() { # fetch_bundles FOLDER
    local part=$1.part archive
    rm -rf "$part"
    mkdir -p "$part"
    for package in "$ORT_WEB" "$TOKENIZERS_JS"; do
        archive=$(cd "$part" && npm pack --silent "$package") &&
            tar -xzf "$part/$archive" -C "$part" --strip-components=2 --wildcards \
                '*/dist/ort.wasm.bundle.min.mjs' '*/dist/ort-wasm-simd-threaded.wasm' \
                '*/dist/tokenizers.min.mjs' 2>/dev/null || true
        rm -f "$part"/*.tgz
    done
    [ "$(find "$part" -type f | wc -l)" = 3 ] || return 1
    mv "$part" "$1"
}

BROWSER_PACKAGES=$VENV/browser-${ORT_WEB#*@}
if [ ! -d "$BROWSER_PACKAGES" ] && ! fetch_bundles "$BROWSER_PACKAGES"; then
    echo "npm's $ORT_WEB and $TOKENIZERS_JS cannot be had" >&2
    return 1
fi
